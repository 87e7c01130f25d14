"""Machines as numbers: a device, and the network between ranks. They are built in, or measured; both are YAML files."""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from zerograph.errors import ConfigError

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rate:
    """Amount per second as a function of the amount per call: linear between points, on log scales.

    Attributes:
        points: (amount, amount per second), by increasing amount.
    """

    points: Points

    def seconds(self, amount: float) -> float:
        """Return the seconds for an amount."""
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
    """A device.

    Attributes:
        memory: bytes of memory.
        headroom: bytes of the memory that a plan leaves free; see :func:`default_headroom`.
        products: operations per second in matrix products, by dtype (``"bfloat16"``); other dtypes run as
            ``"float32"``.
        peaks: operations per second in matrix products by the data sheet, by dtype; the reference of model-flops
            utilisation. Empty without a data sheet.
        shares: share of the rate of ``products`` that other products reach: ``"convolution"``, ``"attention"``;
            default 1.
        moved: bytes per second that operators read and write, by kind of operator (see
            :func:`zerograph.planner.costs.kind`); other kinds run as ``"memory"``.
        overhead: seconds of overhead per operator.
        in_step: factor on the time of operators in a step, where ranks wait for each other and share memory.
        host: bytes per second between its memory and the CPU's, each way.
        file: bytes per second from and to files.
        fuses: a compiler fuses adjacent pointwise operators into one kernel.
        accelerator: it has its own memory, so that state can be offloaded to the CPU's memory; in a file the default
            is the value of ``fuses``.
        cpu: bytes per second that the CPU reads and writes for each device when it updates offloaded state.
        cpu_memory: bytes of CPU memory for each device; None for unlimited.
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
        """Bytes for the tensors of a step."""
        return max(0, self.memory - self.headroom)

    def product_seconds(self, dtype: str, operations: float, kind: str = "") -> float:
        """Return the seconds of a product of that many floating-point operations."""
        return self.products.get(dtype, self.products["float32"]).seconds(operations) / self.shares.get(kind, 1.0)

    def moved_seconds(self, kind: str, count: float) -> float:
        """Return the seconds of an operator of that kind that reads and writes ``count`` bytes."""
        return self.moved.get(kind, self.moved["memory"]).seconds(count)


@dataclass(frozen=True)
class Link:
    """One level of the network.

    Attributes:
        ranks: number of consecutive ranks that it connects, such as those of a node or a pod; None for all.
        rate: bytes per second that each rank sends over its own link while all others send too.
        latency: seconds until the first byte arrives.
        overlap: as that of the machine, for exchanges within this level; None: the machine's.
    """

    ranks: int | None
    rate: Rate
    latency: float
    overlap: float | None = None


@dataclass(frozen=True)
class Machine:
    """A device and the network between many of them.

    Attributes:
        links: levels from the innermost out; the last connects all ranks.
        overlap: share of a collective's time in which the device computes at full speed.
        source: origin of the numbers.
        order: the rank at each position of the mesh, in row-major order; None: the ranks in order.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    overlap: float = 1.0
    source: str = field(default="", compare=False)
    order: tuple[int, ...] | None = None


def machine(which: str | os.PathLike[str] | Machine) -> Machine:
    """Return a machine by its name (``"h100"``, ``"h200"``, ``"a100"``, ``"cpu"``), or from a YAML file.

    Raises:
        ConfigError: there is no such machine or file, or the file is incomplete or malformed.
    """
    if isinstance(which, Machine):
        return which
    builtin = names()
    if which in builtin:
        text = (resources.files(__package__) / "machines" / f"{which}.yaml").read_text()
    elif Path(which).is_file():
        text = Path(which).read_text()
    else:
        raise ConfigError(
            f"there is no machine {os.fspath(which)!r}: choose {', '.join(builtin)}, or give a YAML file\n"
            "`zerograph calibrate OUT.yaml` measures this one and writes such a file."
        )
    try:
        return _read(yaml.safe_load(text))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{os.fspath(which)} does not describe a machine: {reason}") from error


def default_headroom(memory: int, *, accelerator: bool) -> int:
    """Return the bytes of a device's memory that a plan leaves free.

    An accelerator's context, NCCL's buffers and the allocator's fragmentation are not in the graph: 8 % of the memory,
    and at least 2 GiB. A CPU has none of the three.
    """
    return max(2 * 2**30, memory * 8 // 100) if accelerator else 0


def names() -> list[str]:
    """Return the names of the built-in machines."""
    folder = resources.files(__package__) / "machines"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def write(path: str | os.PathLike[str], described: Machine) -> None:
    """Write a YAML file that :func:`machine` reads."""
    content: dict[str, Any] = {
        "name": described.name,
        "source": described.source,
        "overlap": _short(described.overlap),
        "device": _plain({name: getattr(described.device, name) for name in _DEVICE}),
        "links": [
            {"ranks": link.ranks, **_plain({"rate": link.rate, "latency": link.latency, "overlap": link.overlap})}
            for link in described.links
        ],
    }
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None))


def _plain(value: Any) -> Any:
    """Return a value as YAML: rates as points, numbers as exact as a measurement; without what is empty or None."""
    if isinstance(value, Rate):
        points = [[_short(amount), _short(rate)] for amount, rate in value.points]
        return points if len(points) > 1 else points[0][1]
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items() if part is not None and part != {}}
    return _short(value) if isinstance(value, float) else value


def _short(number: float) -> float:
    """Round to three significant digits, the precision of a measurement."""
    return float(f"{number:.3g}")


def _read(content: Mapping[str, Any]) -> Machine:
    fields = content["device"]
    for name in ("memory", "products", "moved", "overhead"):
        fields[name]
    values = {name: read(fields[name]) for name, read in _DEVICE.items() if fields.get(name) is not None}
    device = Device(**{"accelerator": values.get("fuses", True), **values})
    device.products["float32"], device.moved["memory"]
    links = tuple(map(_link, content["links"]))
    reaches = [math.inf if link.ranks is None else link.ranks for link in links]
    if not links or reaches[-1] != math.inf or any(a >= b for a, b in itertools.pairwise(reaches)):
        raise ValueError("each link must connect more ranks than the one before, and the last one all (ranks: null)")
    overlap = _overlap(content.get("overlap", 1.0))
    return Machine(str(content["name"]), device, links, overlap, str(content.get("source", "")))


def _link(fields: Mapping[str, Any]) -> Link:
    ranks, overlap = fields.get("ranks"), fields.get("overlap")
    return Link(
        None if ranks is None else int(ranks),
        _rate(fields["rate"]),
        _number(fields["latency"]),
        None if overlap is None else _overlap(overlap),
    )


def _overlap(value: Any) -> float:
    overlap = _number(value)
    if overlap > 1:
        raise ValueError(f"overlap is a share of a collective's time, at most 1, not {overlap}")
    return overlap


def _rate(value: Any) -> Rate:
    """Read a rate: a number, or a list of [amount, amount per second]."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        points = tuple(sorted((_positive(amount), _positive(rate)) for amount, rate in value))
        if not points:
            raise ValueError("a rate without points")
        return Rate(points)
    return Rate(((1.0, _positive(value)),))


def _number(value: Any) -> float:
    # YAML reads 1e9 as text, and 1.0e+9 as a number.
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r} is not a number from 0 up")
    return number


def _positive(value: Any) -> float:
    number = _number(value)
    if not number:
        raise ValueError(f"{value!r} is not more than 0")
    return number


def _whole(value: Any) -> int:
    return int(_positive(value))


def _by_name(read: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda values: {str(name): read(value) for name, value in values.items()}


# How the fields of a device in a file are read; those that are missing have Device's defaults.
_DEVICE: Mapping[str, Callable[[Any], Any]] = {
    "memory": _whole,
    "products": _by_name(_rate),
    "moved": _by_name(_rate),
    "shares": _by_name(_positive),
    "peaks": _by_name(_positive),
    "overhead": _number,
    "in_step": _positive,
    "host": _positive,
    "file": _positive,
    "fuses": bool,
    "accelerator": bool,
    "cpu": _positive,
    "cpu_memory": _whole,
}
