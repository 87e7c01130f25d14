"""The contents of a report as plain numbers and texts: a step's nodes after every pass, its memory and its time.

Nodes are stored as *records*, each distinct one once. A node that a pass does not change costs nothing, so twenty
passes over a large graph take little more space than the graph itself.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Generic, TypeVar

from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.base.source import relative_to_package
from zerograph.inspection.report.facts import Fact, facts
from zerograph.inspection.report.order import Allocation, Order, OrderedNode, allocations, run_order
from zerograph.inspection.step import Inspection
from zerograph.inspection.text import dtype_name
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

# Lanes of the picture, from left to right: inputs, then compute and communication of each phase.
STATE, FORWARD_WIRE, FORWARD, BACKWARD, BACKWARD_WIRE, UPDATE, UPDATE_WIRE = range(7)
_LANES = {"forward": FORWARD, "backward": BACKWARD, "update": UPDATE}
_WIRES = {"forward": FORWARD_WIRE, "backward": BACKWARD_WIRE, "update": UPDATE_WIRE}

# Flags of a node.
VIEW, BOXING, WAITS, RECOMPUTED, RETURNED, REPEATED, IN_PLACE = (1 << bit for bit in range(7))

# Rows that are no modules: inputs of the step that belong to no module, and nodes without module and line.
INPUTS, NOWHERE = "\0inputs", "\0step"


Item = TypeVar("Item", bound=Hashable)


class Interned(Generic[Item]):
    """Distinct values in the order of their first use; calling it with a value returns its number."""

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}

    def __call__(self, item: Item) -> int:
        """Return the number of a value; add it if it is new."""
        return self._numbers.setdefault(item, len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def items(self) -> list[Item]:
        """The values by number."""
        return list(self._numbers)


@dataclass(frozen=True)
class Kind:
    """The attributes of a node that do not depend on its position: many nodes are of one kind.

    Attributes:
        op: short name of the operator; ``target`` is the full one.
        sbp: text; empty before placement.
        shape: this rank's shape, with the dtype; ``whole`` is the global shape, from ``localize`` on.
        bytes: size on this rank.
        flags: the flags above.
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
    """The position of a node: qualified name of a module (or a special row), the user's source line, and a lane."""

    module: str
    source: str
    lane: int
    phase: str


@dataclass(frozen=True)
class Record:
    """A node after a pass. Its fields are numbers in the tables of :class:`Nodes`; tensor 0 and boxing -1 mean none."""

    name: int
    kind: int
    where: int
    tensor: int
    boxing: int
    inputs: tuple[int, ...]


@dataclass
class Nodes:
    """All nodes of all passes: each distinct text, kind, position and record once."""

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
    """A pass, and the records of the nodes after it, in the order in which they run."""

    name: str
    summary: str
    seconds: float
    records: Sequence[int]


@dataclass(frozen=True)
class Time:
    """A predicted timeline of the nodes after the last pass.

    Attributes:
        machine: its name.
        seconds: duration of the step.
        events: (index of the node, start, end, stream, seconds of waiting); of a loop only the first micro-batch.
    """

    machine: str
    seconds: float
    events: Sequence[tuple[int, float, float, str, float]]


@dataclass(frozen=True)
class Report:
    """The contents of a page.

    Attributes:
        title: title of the page.
        facts: head of the page.
        nodes, passes: the graph after each pass.
        buckets: names of the parameters in each bucket, in order.
        allocations: memory over the nodes after the last pass.
        peak: predicted peak in bytes.
        time: predicted timeline; None without a machine.
        repetitions: runs per step by node index, for nodes after the last pass that run more than once.
    """

    title: str
    facts: Sequence[Fact]
    nodes: Nodes
    passes: Sequence[Pass]
    buckets: Mapping[str, Sequence[str]]
    allocations: Sequence[Allocation]
    peak: int
    time: Time | None
    repetitions: Mapping[int, int]


def collect(step: Inspection, title: str, machine: Machine | None) -> Report:
    """Collect the contents of a report; this runs every pass again.

    Args:
        machine: predict times for it; None for a report without times.
    """
    context, last = step.context, step.passes[-1].graph.graph
    nodes = Nodes()
    reader = _Reader(nodes, context)
    # The last graph is the one that runs: memory and times are predicted for its nodes.
    *earlier, ran = step.passes
    passes = [
        Pass(record.name, record.summary, record.seconds, reader.read(run_order(module.graph)))
        for record, (_, module) in zip(earlier, stages(step.captured.graph, context), strict=False)
    ]
    order = run_order(last)
    passes.append(Pass(ran.name, ran.summary, ran.seconds, reader.read(order)))
    memory = profile(last)
    indices = {ordered.node: index for index, ordered in enumerate(order.nodes)}
    time = None if machine is None else timeline(last, machine, context.mesh)
    return Report(
        title,
        facts(step, memory, machine, time),
        nodes,
        passes,
        {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in context.buckets},
        allocations(memory, last, order),
        memory.peak,
        None if machine is None or time is None else _time(machine, time, indices),
        {index: ordered.times for index, ordered in enumerate(order.nodes) if ordered.times > 1},
    )


def _time(machine: Machine, time: Timeline, indices: Mapping[fx.Node, int]) -> Time:
    events = [(indices[event.node], event.start, event.end, event.stream, event.waits) for event in time.events]
    return Time(machine.name, time.seconds, events)


# Keys of a node's metadata that its record depends on.
_KEYS = ("val", "sbp", "global", "boxing", "origin", "role", "recomputed", "local", "parameter", "gradient")


class _Reader:
    """Reads the nodes pass after pass; records of unchanged nodes are cached."""

    def __init__(self, nodes: Nodes, context: Context) -> None:
        self._nodes = nodes
        self._homes = {bucket.name: _home(bucket) for bucket in context.buckets}
        self._cache: dict[fx.Node, tuple[tuple[Any, ...], tuple[Any, ...], int]] = {}

    def read(self, order: Order) -> list[int]:
        """Return the numbers of the nodes' records, in order."""
        homes = self._update_homes(order.nodes)
        return [self._record(each, homes.get(each.name), each.name in order.returned) for each in order.nodes]

    def _record(self, ordered: OrderedNode, home: str | None, returned: bool) -> int:
        node, meta = ordered.node, ordered.node.meta
        # The former are compared by identity, the latter by value.
        objects = (node.args, node.kwargs, node.target, *map(meta.get, _KEYS))
        values = (ordered.name, ordered.inputs, home, returned, ordered.times)
        cached = self._cache.get(node)
        if cached is not None and all(map(is_, cached[0], objects)) and cached[1] == values:
            return cached[2]
        nodes = self._nodes
        boxing = boxing_of(node)
        number = nodes.records(
            Record(
                nodes.names(ordered.name),
                nodes.kinds(_kind(node, returned, ordered.times > 1)),
                nodes.wheres(self._where(node, home)),
                nodes.tensors(_tensor(node)),
                nodes.boxings(_boxing(boxing)) if boxing is not None else -1,
                tuple(map(nodes.names, ordered.inputs)),
            )
        )
        self._cache[node] = objects, values, number
        return number

    def _where(self, node: fx.Node, home: str | None) -> Where:
        source, graph_input = origin(node), role(node)
        line = relative_to_package(source.source)
        if line:
            self._nodes.code[line] = source.code
        if node.op in ("placeholder", "get_attr"):
            return Where(self._module_of(graph_input), "", STATE, "")
        lane = _WIRES[source.phase] if boxing_of(node) is not None or node.target is WAIT else _LANES[source.phase]
        if source.phase == "update" and home is not None:
            return Where(home, "", lane, source.phase)
        if not source.module and not line:
            return Where(NOWHERE, "", lane, source.phase)
        return Where(source.module, line, lane, source.phase)

    def _module_of(self, graph_input: Role | None) -> str:
        """Return the module of an input; for a bucket and its state, the module of the bucket's first parameter."""
        if graph_input is None:
            return NOWHERE
        if graph_input.kind in ("parameter", "buffer"):
            return graph_input.name.rpartition(".")[0] or NOWHERE
        return INPUTS if graph_input.bucket is None else self._homes.get(graph_input.bucket, INPUTS)

    def _update_homes(self, nodes: Sequence[OrderedNode]) -> dict[str, str]:
        """Return the module of each node of the update, by name: that of the bucket which the node updates.

        A node for several buckets, such as the norm of all gradients, has none.
        """
        homes: dict[str, str | None] = {}
        for each in nodes:
            graph_input = role(each.node)
            if graph_input is not None and graph_input.kind in ("bucket", "state"):
                assert graph_input.bucket is not None
                homes[each.name] = self._homes.get(graph_input.bucket)
            elif each.node.op != "placeholder" and origin(each.node).phase == "update":
                inputs = {home for name in each.inputs if (home := homes.get(name)) is not None}
                homes[each.name] = inputs.pop() if len(inputs) == 1 else None
        readers: dict[str, set[str | None]] = {}
        for each in reversed(nodes):
            if homes.get(each.name) is None and each.name in homes and each.name in readers:
                (first, *more) = readers[each.name]
                homes[each.name] = None if more else first
            if each.name in homes:
                for name in each.inputs:
                    readers.setdefault(name, set()).add(homes[each.name])
        return {name: home for name, home in homes.items() if home is not None}


def _home(bucket: Bucket) -> str:
    return bucket.slots[0].name.rpartition(".")[0] or NOWHERE


def _tensor(node: fx.Node) -> str:
    """Return the name of the tensor that the node holds or moves; empty for a mere value."""
    if (graph_input := role(node)) is not None:
        return graph_input.name
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
    parts = [part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, Tensor)]
    shape = ", ".join(f"{_shape(part.shape)} {dtype_name(part.dtype)}".strip() for part in parts)
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
    """Return the operation of a node in a word."""
    if (graph_input := role(node)) is not None:
        return graph_input.kind
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
    sbp = meta(node).get("sbp")
    if not sbp:
        return "local" if meta(node).get("local") else ""
    if isinstance(sbp[0], tuple):
        # An operator with several results.
        return " ".join(dict.fromkeys(show(result) for result in sbp if result))
    return show(sbp)


def _shape(shape: Iterable[int]) -> str:
    return "\N{MULTIPLICATION SIGN}".join(map(str, shape)) or "scalar"
