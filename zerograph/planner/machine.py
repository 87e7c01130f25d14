"""What a step runs on, as numbers: a device, and the network between ranks. Built in, or measured, as YAML files."""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from zerograph.errors import ConfigError

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rate:
    """How much a device does per second, by how much it is given at once: linear between points, on log scales.

    Attributes:
        points: (amount, amount per second), by growing amount.
    """

    points: Points

    def seconds(self, amount: float) -> float:
        """How long so much takes."""
        if amount <= 0:
            return 0.0
        sizes = [size for size, _ in self.points]
        right = bisect.bisect(sizes, amount)
        if right in (0, len(sizes)):
            return amount / self.points[min(right, len(sizes) - 1)][1]
        (low, slow), (high, fast) = self.points[right - 1], self.points[right]
        share = math.log(amount / low) / math.log(high / low)
        return float(amount / (slow * (fast / slow) ** share))


@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        memory: bytes that the device has.
        headroom: bytes of them that a plan leaves free; see :func:`default_headroom`.
        products: operations per second in matrix products and the like, by dtype (``"bfloat16"``); what is not listed
            runs as ``"float32"`` does.
        peaks: operations per second in matrix products as the data sheet has them, by dtype; what model-flops
            utilisation is a share of. Empty where no data sheet is known.
        shares: of the rate of ``products``, what products of other kinds reach: ``"convolution"``, ``"attention"``;
            those that are not listed reach it all.
        moved: bytes per second that operators read and write, by kind of operator (see
            :func:`zerograph.planner.costs.kind`); ``"memory"`` stands for kinds that are not listed.
        overhead: seconds that each operator takes beside that.
        in_step: how many times as long all that takes in a step, where ranks wait for each other and share memory.
        host: bytes per second between its memory and the CPU's, each way.
        file: bytes per second from and to files.
        fuses: a compiler makes one kernel of operators that follow each other element by element.
        accelerator: it has memory of its own beside the CPU's, in which things may then rest; in a file that does not
            say so, what ``fuses`` is.
        cpu: bytes per second that the CPU reads and writes for each device, where it updates what rests there.
        cpu_memory: bytes of the CPU's memory for each device; None: not known, as much as it takes.
    """

    memory: int
    products: Mapping[str, Rate]
    moved: Mapping[str, Rate]
    overhead: float
    shares: Mapping[str, float] = field(default_factory=dict)
    in_step: float = 1.0
    host: float = 25e9
    file: float = 2e9
    fuses: bool = True
    accelerator: bool = True
    cpu: float = 40e9
    cpu_memory: int | None = None
    headroom: int = 0
    peaks: Mapping[str, float] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Bytes that a step's tensors may take."""
        return max(0, self.memory - self.headroom)

    def product_seconds(self, dtype: str, operations: float, kind: str = "") -> float:
        """Of a product of so many floating-point operations."""
        return self.products.get(dtype, self.products["float32"]).seconds(operations) / self.shares.get(kind, 1.0)

    def moved_seconds(self, kind: str, count: float) -> float:
        """Of an operator of that kind that reads and writes so many bytes."""
        return self.moved.get(kind, self.moved["memory"]).seconds(count)


@dataclass(frozen=True)
class Link:
    """One level of the network.

    Attributes:
        ranks: how many ranks that follow each other it joins: those of a node, of a pod; None for all.
        rate: bytes per second that each rank sends over its own link while others do too.
        latency: seconds until the first byte is there.
    """

    ranks: int | None
    rate: Rate
    latency: float


@dataclass(frozen=True)
class Machine:
    """A device and the network between many of them.

    Attributes:
        links: from the innermost level out; the last joins all ranks.
        overlap: the share of a collective's time in which the device goes on computing at full speed.
        source: where the numbers come from.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    overlap: float = 1.0
    source: str = field(default="", compare=False)


def machine(which: str | os.PathLike[str] | Machine) -> Machine:
    """A machine by its name (``"h100"``, ``"h200"``, ``"a100"``, ``"cpu"``), or from a YAML file.

    Raises:
        ConfigError: no such machine or file, or one that says too little or something else.
    """
    if isinstance(which, Machine):
        return which
    known = names()
    if which in known:
        text = (resources.files(__package__) / "machines" / f"{which}.yaml").read_text()
    elif Path(which).is_file():
        text = Path(which).read_text()
    else:
        raise ConfigError(
            f"there is no machine {os.fspath(which)!r}: choose {', '.join(known)}, or give a YAML file\n"
            "`zerograph calibrate OUT.yaml` measures this one and writes such a file."
        )
    try:
        return _read(yaml.safe_load(text))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{os.fspath(which)} does not describe a machine: {reason}") from error


def default_headroom(memory: int, *, accelerator: bool) -> int:
    """Bytes of a device's memory that no plan may count on.

    An accelerator's context, NCCL's buffers and the allocator's fragmentation are not in the graph: 8 % of the memory,
    and at least 2 GiB. A CPU has none of the three.
    """
    return max(2 * 2**30, memory * 8 // 100) if accelerator else 0


def names() -> list[str]:
    """Return the machines that are built in."""
    folder = resources.files(__package__) / "machines"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def write(path: str | os.PathLike[str], described: Machine) -> None:
    """Write a YAML file that :func:`machine` reads."""
    device = described.device
    content: dict[str, Any] = {
        "name": described.name,
        "source": described.source,
        "overlap": _short(described.overlap),
        "device": {
            "memory": device.memory,
            "products": {dtype: _plain(rate) for dtype, rate in device.products.items()},
            "moved": {kind: _plain(rate) for kind, rate in device.moved.items()},
            "shares": {kind: _short(share) for kind, share in device.shares.items()},
            **({"peaks": dict(device.peaks)} if device.peaks else {}),
            "overhead": _short(device.overhead),
            "in_step": _short(device.in_step),
            "host": device.host,
            "file": device.file,
            "fuses": device.fuses,
            "accelerator": device.accelerator,
            "cpu": _short(device.cpu),
            **({} if device.cpu_memory is None else {"cpu_memory": device.cpu_memory}),
        },
        "links": [
            {"ranks": one.ranks, "rate": _plain(one.rate), "latency": _short(one.latency)} for one in described.links
        ],
    }
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None))


def _read(content: Mapping[str, Any]) -> Machine:
    given = content["device"]
    device = Device(
        memory=int(_positive(given["memory"])),
        products={str(dtype): _rate(rate) for dtype, rate in given["products"].items()},
        moved={str(kind): _rate(rate) for kind, rate in given["moved"].items()},
        peaks={str(dtype): _positive(rate) for dtype, rate in given.get("peaks", {}).items()},
        shares={str(kind): _positive(share) for kind, share in given.get("shares", {}).items()},
        overhead=_number(given["overhead"]),
        in_step=_positive(given.get("in_step", 1.0)),
        host=_positive(given.get("host", 25e9)),
        file=_positive(given.get("file", 2e9)),
        fuses=bool(given.get("fuses", True)),
        accelerator=bool(given.get("accelerator", given.get("fuses", True))),
        cpu=_positive(given.get("cpu", 40e9)),
        cpu_memory=None if given.get("cpu_memory") is None else int(_positive(given["cpu_memory"])),
    )
    device.products["float32"], device.moved["memory"]
    links = tuple(
        Link(None if one.get("ranks") is None else int(one["ranks"]), _rate(one["rate"]), _number(one["latency"]))
        for one in content["links"]
    )
    reaches = [math.inf if one.ranks is None else one.ranks for one in links]
    if not links or reaches[-1] != math.inf or any(a >= b for a, b in itertools.pairwise(reaches)):
        raise ValueError("its links must join more and more ranks, the last one all (ranks: null)")
    overlap = _number(content.get("overlap", 1.0))
    if overlap > 1:
        raise ValueError(f"overlap is a share of a collective's time, at most 1, not {overlap}")
    return Machine(str(content["name"]), device, links, overlap, str(content.get("source", "")))


def _rate(value: Any) -> Rate:
    """A number, or a list of [amount, amount per second]."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        points = tuple(sorted((_positive(amount), _positive(rate)) for amount, rate in value))
        if not points:
            raise ValueError("a rate without points")
        return Rate(points)
    return Rate(((1.0, _positive(value)),))


def _plain(rate: Rate) -> Any:
    if len(rate.points) == 1:
        return _short(rate.points[0][1])
    return [[_short(amount), _short(each)] for amount, each in rate.points]


def _short(number: float) -> float:
    """To the three digits that a measurement has at best."""
    return float(f"{number:.3g}")


def _number(value: Any) -> float:
    # YAML takes 1e9 for text: it wants 1.0e+9.
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r} is not a number from 0 up")
    return number


def _positive(value: Any) -> float:
    number = _number(value)
    if not number:
        raise ValueError(f"{value!r} is not more than 0")
    return number
