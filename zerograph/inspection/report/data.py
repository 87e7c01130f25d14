"""The contents of a report as plain numbers and texts: a step's nodes after every pass, its memory and its time.

Nodes are kept as *records*, each distinct one once. A pass that leaves a node as it was costs nothing, so that some
twenty passes over a large graph take little more room than the graph itself.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.base.source import relative_to_package
from zerograph.inspection.report.facts import Fact, facts
from zerograph.inspection.report.intern import Interned
from zerograph.inspection.report.sequence import Held, Placed, Sequenced, held, sequence
from zerograph.inspection.step import Inspection
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.buckets import Bucket
from zerograph.ir.loop import loop_of
from zerograph.ir.memory import profile
from zerograph.ir.metadata import Boxing, Role, TensorRef, boxing_of, meta, origin, role
from zerograph.ir.sbp import show
from zerograph.ir.step_graph import nbytes
from zerograph.passes.context import Context
from zerograph.passes.pipeline import stages
from zerograph.planner.machine import Machine
from zerograph.planner.timeline import Timeline, timeline

# Lanes of the picture, from left to right. Communication has one beside each phase.
REST, FORWARD_WIRE, FORWARD, BACKWARD, BACKWARD_WIRE, UPDATE, UPDATE_WIRE = range(7)
_LANES = {"forward": FORWARD, "backward": BACKWARD, "update": UPDATE}
_WIRES = {"forward": FORWARD_WIRE, "backward": BACKWARD_WIRE, "update": UPDATE_WIRE}

# Bits of what a node is.
VIEW, BOXING, WAITS, RECOMPUTED, RETURNED, REPEATED, IN_PLACE = (1 << bit for bit in range(7))

# Places that are no module's: what enters the step beside parameters and buffers, and what belongs nowhere.
INPUTS, NOWHERE = "\0inputs", "\0step"


@dataclass(frozen=True)
class Kind:
    """What a node is, wherever it stands: many nodes are of one kind.

    Attributes:
        op: short name of the operator; ``target`` is the whole one.
        sbp: as text, empty where it has none (yet).
        shape: of what this rank holds, with the dtype; ``whole`` is the global one from ``localize`` on.
        bytes: of what this rank holds.
        flags: the bits above.
    """

    op: str
    target: str
    sbp: str
    shape: str
    whole: str
    bytes: int
    flags: int


@dataclass(frozen=True)
class Where:
    """Where a node belongs: a module's qualified name, or a special place, the user's source line, and a lane."""

    module: str
    source: str
    lane: int
    phase: str


@dataclass(frozen=True)
class Record:
    """A node as a pass left it. All but ``inputs`` are numbers in the tables of :class:`Nodes`; 0 is no tensor, -1 no
    boxing."""

    name: int
    kind: int
    where: int
    tensor: int
    boxing: int
    inputs: tuple[int, ...]


@dataclass
class Nodes:
    """All nodes of all passes, each distinct text, kind, place and record once."""

    names: Interned[str] = field(default_factory=Interned)
    kinds: Interned[Kind] = field(default_factory=Interned)
    wheres: Interned[Where] = field(default_factory=Interned)
    tensors: Interned[str] = field(default_factory=Interned)
    boxings: Interned[tuple[str, str, str, str, int, int, int, int]] = field(default_factory=Interned)
    records: Interned[Record] = field(default_factory=Interned)
    code: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors("")


@dataclass(frozen=True)
class Pass:
    """A pass, and the records of the nodes that it left, in the order in which they run."""

    name: str
    summary: str
    seconds: float
    records: Sequence[int]


@dataclass(frozen=True)
class Time:
    """A predicted time line over the last pass's nodes.

    Attributes:
        machine: its name.
        seconds: of the step.
        events: (place of the node in the last pass, start, end, stream, seconds of waiting); of a loop's turns the
            first.
    """

    machine: str
    seconds: float
    events: Sequence[tuple[int, float, float, str, float]]


@dataclass(frozen=True)
class Report:
    """All that a page shows.

    Attributes:
        title: of the page.
        facts: shown at the head of the page.
        nodes, passes: the graph after each pass.
        buckets: names of the parameters in each, in order.
        held: memory over the nodes of the last pass.
        peak: bytes.
        time: where a machine was given.
        turns: how often each node of the last pass runs in a step, for those that run more than once.
    """

    title: str
    facts: Sequence[Fact]
    nodes: Nodes
    passes: Sequence[Pass]
    buckets: Mapping[str, Sequence[str]]
    held: Sequence[Held]
    peak: int
    time: Time | None
    turns: Mapping[int, int]


def collect(step: Inspection, title: str, machine: Machine | None) -> Report:
    """Gather what a report shows. Runs every pass once more.

    Args:
        machine: to predict times for; None for a report without.
    """
    context, last = step.context, step.passes[-1].graph.graph
    nodes = Nodes()
    reader = _Reader(nodes, context)
    # The graph that runs is read itself, not rebuilt: memory and times are predicted for its nodes.
    *earlier, ran = step.passes
    passes = [
        Pass(record.name, record.summary, record.seconds, reader.read(sequence(module.graph)))
        for record, (_, module) in zip(earlier, stages(step.captured.graph, context), strict=False)
    ]
    found = sequence(last)
    passes.append(Pass(ran.name, ran.summary, ran.seconds, reader.read(found)))
    memory = profile(last)
    places = {placed.node: number for number, placed in enumerate(found.places)}
    time = None if machine is None else timeline(last, machine, context.mesh)
    return Report(
        title,
        facts(step, memory, machine, time),
        nodes,
        passes,
        {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in context.buckets},
        held(memory, last, found),
        memory.peak,
        None if machine is None or time is None else _time(machine, time, places),
        {number: placed.times for number, placed in enumerate(found.places) if placed.times > 1},
    )


def _time(machine: Machine, time: Timeline, places: Mapping[fx.Node, int]) -> Time:
    events = [(places[event.node], event.start, event.end, event.stream, event.waits) for event in time.events]
    return Time(machine.name, time.seconds, events)


# What is read of a node's metadata.
_SAID = ("val", "sbp", "global", "boxing", "origin", "role", "recomputed", "local", "parameter", "gradient")


class _Reader:
    """Reads the nodes of one pass after the other; those that a pass left alone are known."""

    def __init__(self, nodes: Nodes, context: Context) -> None:
        self._nodes = nodes
        self._homes = {bucket.name: _home(bucket) for bucket in context.buckets}
        self._known: dict[fx.Node, tuple[tuple[Any, ...], tuple[Any, ...], int]] = {}

    def read(self, found: Sequenced) -> list[int]:
        """Numbers of the nodes' records, in order."""
        homes = self._update_homes(found.places)
        return [self._record(placed, homes.get(placed.name), placed.name in found.returned) for placed in found.places]

    def _record(self, placed: Placed, home: str | None, returned: bool) -> int:
        node, meta = placed.node, placed.node.meta
        now = (node.args, node.kwargs, node.target, *map(meta.get, _SAID))
        also = (placed.name, placed.inputs, home, returned, placed.times)
        before = self._known.get(node)
        if before is not None and all(map(is_, before[0], now)) and before[1] == also:
            return before[2]
        nodes = self._nodes
        boxing = meta.get("boxing")
        number = nodes.records(
            Record(
                nodes.names(placed.name),
                nodes.kinds(_kind(node, returned, placed.times > 1)),
                nodes.wheres(self._where(node, home)),
                nodes.tensors(_tensor(node)),
                nodes.boxings(_boxing(boxing)) if boxing is not None else -1,
                tuple(map(nodes.names, placed.inputs)),
            )
        )
        self._known[node] = now, also, number
        return number

    def _where(self, node: fx.Node, home: str | None) -> Where:
        found, given = origin(node), role(node)
        line = relative_to_package(found.source)
        if line:
            self._nodes.code[line] = found.code
        if node.op in ("placeholder", "get_attr"):
            return Where(self._module_of(given), "", REST, "")
        lane = _WIRES[found.phase] if boxing_of(node) is not None or node.target is WAIT else _LANES[found.phase]
        if found.phase == "update" and home is not None:
            return Where(home, "", lane, found.phase)
        if not found.module and not line:
            return Where(NOWHERE, "", lane, found.phase)
        return Where(found.module, line, lane, found.phase)

    def _module_of(self, given: Role | None) -> str:
        """The module that an input belongs to; of a bucket, and its state, that of the first parameter in it."""
        if given is None:
            return NOWHERE
        if given.kind in ("parameter", "buffer"):
            return given.name.rpartition(".")[0] or NOWHERE
        return INPUTS if given.bucket is None else self._homes.get(given.bucket, INPUTS)

    def _update_homes(self, places: Sequence[Placed]) -> dict[str, str]:
        """The module beside whose parameters each node of the update stands: that of the bucket which it updates.

        What is computed for several buckets, a norm of all gradients for instance, has none.
        """
        homes: dict[str, str | None] = {}
        for placed in places:
            given = role(placed.node)
            if given is not None and given.kind in ("bucket", "state"):
                homes[placed.name] = self._homes.get(given.name.partition(".")[0])
            elif placed.node.op != "placeholder" and origin(placed.node).phase == "update":
                inputs = {home for name in placed.inputs if (home := homes.get(name)) is not None}
                homes[placed.name] = inputs.pop() if len(inputs) == 1 else None
        readers: dict[str, set[str | None]] = {}
        for placed in reversed(places):
            if homes.get(placed.name) is None and placed.name in homes and placed.name in readers:
                (first, *more) = readers[placed.name]
                homes[placed.name] = None if more else first
            if placed.name in homes:
                for name in placed.inputs:
                    readers.setdefault(name, set()).add(homes[placed.name])
        return {name: home for name, home in homes.items() if home is not None}


def _home(bucket: Bucket) -> str:
    return bucket.slots[0].name.rpartition(".")[0] or NOWHERE


def _tensor(node: fx.Node) -> str:
    """The tensor that a user would look for under another name than the node's."""
    if (given := role(node)) is not None:
        return given.name
    boxing = boxing_of(node)
    if boxing is not None:
        return _shown(str(boxing.tensor))
    if isinstance(name := meta(node).get("parameter"), str):
        return name
    bucket = meta(node).get("gradient")
    return "" if bucket is None else str(TensorRef("gradient", bucket))


def _boxing(boxing: Boxing) -> tuple[str, str, str, str, int, int, int, int]:
    source, target = show(boxing.source), show(boxing.target)
    tensor = _shown(str(boxing.tensor))
    return (boxing.kind, source, target, tensor, boxing.bytes, round(boxing.sent), boxing.dim, boxing.ranks)


def _shown(tensor: str) -> str:
    """Shorten the source line in ``sum of /.../site-packages/transformers/loss.py:42``."""
    operator, of, line = tensor.rpartition(" of ")
    return f"{operator}{of}{relative_to_package(line)}"


def _kind(node: fx.Node, returned: bool, repeated: bool) -> Kind:
    value = node.meta.get("val")
    parts = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)]
    shape = ", ".join(f"{_shape(one.shape)} {_dtype(one.dtype)}".strip() for one in parts)
    whole = meta(node).get("global")
    boxed = boxing_of(node) is not None
    flags = (
        (VIEW if is_view(node) or node.target is operator.getitem else 0)
        | (BOXING if boxed else 0)
        | (WAITS if node.target is WAIT else 0)
        | (RECOMPUTED if meta(node).get("recomputed") else 0)
        | (RETURNED if returned else 0)
        | (REPEATED if repeated else 0)
        | (IN_PLACE if isinstance(node.target, OpOverload) and _torch.is_mutable(node.target) else 0)
    )
    target = str(node.target) if not callable(node.target) or isinstance(node.target, OpOverload) else _name_of(node)
    return Kind(
        _short(node), target, _sbp(node), shape, "" if whole is None else _shape(whole), sum(map(nbytes, parts)), flags
    )


def _name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _short(node: fx.Node) -> str:
    """What a node does, in a word."""
    if (given := role(node)) is not None:
        return given.kind
    boxing = boxing_of(node)
    if boxing is not None:
        return boxing.kind
    if (loop := loop_of(node)) is not None:
        return f"{loop.micro_batches} micro-batches"
    if node.target is WAIT:
        return "wait"
    if isinstance(node.target, OpOverload):
        name = str(node.target).partition(".")[2]
        return name.removesuffix(".default").removesuffix(".Tensor").removesuffix(".Scalar").removesuffix(".int")
    return _name_of(node) if callable(node.target) else str(node.target)


def _sbp(node: fx.Node) -> str:
    found = meta(node).get("sbp")
    if not found:
        return "local" if meta(node).get("local") else ""
    if isinstance(found[0], tuple):
        # An operator with several results.
        counted = Counter(show(one) for one in found if one)
        return " ".join(counted) if counted else ""
    return show(found)


def _shape(shape: Iterable[int]) -> str:
    return "\N{MULTIPLICATION SIGN}".join(map(str, shape)) or "scalar"


_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def _dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
