"""The nodes of a step after every pass, as plain numbers and texts.

Nodes are stored as *records*, each distinct one once. A node that a pass does not change costs nothing, so twenty
passes over a large graph take little more space than the graph itself.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

from torch import fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.base.source import relative_to_package
from zerograph.inspection.report.order import Order, OrderedNode
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Boxing, Role, TensorRef, boxing_of, meta, origin, role
from zerograph.ir.sbp import show
from zerograph.ir.step_graph import nbytes, tensors_of
from zerograph.passes.context import Context

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


class Kind(NamedTuple):
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


class Where(NamedTuple):
    """The position of a node: qualified name of a module (or a special row), the user's source line, and a lane."""

    module: str
    source: str
    lane: int
    phase: str


class Record(NamedTuple):
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
    boxings: Interned[tuple[str | int, ...]] = field(default_factory=Interned)
    records: Interned[Record] = field(default_factory=Interned)
    code: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors("")


# Keys of a node's metadata that its record depends on.
_KEYS = ("val", "sbp", "global", "boxing", "origin", "role", "recomputed", "local", "parameter", "gradient")


class Reader:
    """Reads the nodes pass after pass; records of unchanged nodes are cached."""

    def __init__(self, nodes: Nodes, context: Context) -> None:
        self._nodes = nodes
        modules = {bucket.name: bucket.slots[0].name.rpartition(".")[0] for bucket in context.buckets}
        self._homes = {name: module or NOWHERE for name, module in modules.items()}
        self._cache: dict[fx.Node, tuple[tuple[Any, ...], tuple[Any, ...], int]] = {}

    def read(self, order: Order) -> list[int]:
        """Return the numbers of the nodes' records, in order."""
        homes = self._update_homes(order.nodes)
        return [self._record(each, homes.get(each.name), each.name in order.returned) for each in order.nodes]

    def _record(self, ordered: OrderedNode, home: str | None, returned: bool) -> int:
        node, meta = ordered.node, ordered.node.meta
        # The former are compared by identity, the latter by value.
        objects = (node.args, node.kwargs, node.target, *map(meta.get, _KEYS))
        values = (ordered.name, ordered.inputs, home, returned, ordered.row.times)
        cached = self._cache.get(node)
        if cached is not None and all(map(is_, cached[0], objects)) and cached[1] == values:
            return cached[2]
        nodes = self._nodes
        boxing = boxing_of(node)
        number = nodes.records(
            Record(
                nodes.names(ordered.name),
                nodes.kinds(_kind(node, returned, ordered.row.times > 1)),
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
        homes = {
            each.name: self._homes.get(each.row.bucket or "")
            for each in nodes
            if each.row.bucket is not None or (each.node.op != "placeholder" and origin(each.node).phase == "update")
        }
        readers: dict[str, set[str | None]] = {}
        for each in reversed(nodes):
            if homes.get(each.name) is None and each.name in homes and each.name in readers:
                (first, *more) = readers[each.name]
                homes[each.name] = None if more else first
            if each.name in homes:
                for name in each.inputs:
                    readers.setdefault(name, set()).add(homes[each.name])
        return {name: home for name, home in homes.items() if home is not None}


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


def _boxing(boxing: Boxing) -> tuple[str | int, ...]:
    source, target = show(boxing.source), show(boxing.target)
    tensor = _shown(str(boxing.tensor))
    return (boxing.kind, source, target, tensor, boxing.bytes, round(boxing.sent), boxing.dim, boxing.ranks)


def _shown(tensor: str) -> str:
    """Shorten the source line in ``sum of /.../site-packages/transformers/loss.py:42``."""
    operator, of, line = tensor.rpartition(" of ")
    return f"{operator}{of}{relative_to_package(line)}"


def _kind(node: fx.Node, returned: bool, repeated: bool) -> Kind:
    parts = tensors_of(node)
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
    target = str(node.target) if isinstance(node.target, OpOverload) else operator_name(node)
    return Kind(
        _short(node), target, _sbp(node), shape, "" if whole is None else _shape(whole), sum(map(nbytes, parts)), flags
    )


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
    return operator_name(node)


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
