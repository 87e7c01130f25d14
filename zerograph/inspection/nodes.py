"""A node's attributes in plain numbers and text, as every export has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, fx

from zerograph.inspection.names import is_boxing, is_wait, labels, tensor_moved
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.loop import loop_of
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import boxing_of, meta, origin, role
from zerograph.ir.sbp import show
from zerograph.passes.context import Context


@dataclass(frozen=True)
class NodeFacts:
    """What exports say of a node: numbers and text only, so that every file format can hold them.

    Attributes:
        id: the node's name in the graph; in the body of a loop behind the loop's name and a slash.
        label: by module path, see :mod:`zerograph.inspection.names`.
        kind: ``"input"``, ``"compute"``, ``"boxing"``, ``"wait"``, ``"loop"`` or ``"output"``.
        operator: ``mm``, ``mm.out``, ...; of an input what it is: ``parameter``, ``bucket``, ``state``, ...
        phase, module, source, code: where it comes from; ``source`` is ``file:line``, ``code`` what stands there.
        dtype, sbp, shape, local_shape: of its value; empty where it yields several tensors, or none.
        bytes: of its value on this rank; 0 likewise.
        at: its place in the graph, from 0, bodies counted once.
        times: how often it runs in a step.
        boxing: ``all-gather`` and so on, of a node that changes an SBP; else empty.
        tensor: what that one moves: ``bucket0``, ``gradient of bucket0``, ...
        sent: bytes that each rank sends for it.
        parameter: the parameter that it is a view of, or is; else empty.
    """

    id: str
    label: str
    kind: str
    operator: str
    phase: str
    module: str
    source: str
    code: str
    dtype: str
    sbp: str
    shape: str
    local_shape: str
    bytes: int
    at: int
    times: int
    boxing: str
    tensor: str
    sent: int
    parameter: str

    def as_dict(self) -> dict[str, Any]:
        """All but the id, by name."""
        found = asdict(self)
        del found["id"]
        return found


@dataclass(frozen=True)
class Edge:
    """A value that one node gives another, by their ids; ``argument`` is its number among the values that are read."""

    source: str
    target: str
    argument: int


def facts(graph: fx.Graph, context: Context) -> tuple[list[NodeFacts], list[Edge]]:
    """All nodes of a graph and of the bodies of its loops, in order, and what they give each other."""
    nodes: list[NodeFacts] = []
    edges: list[Edge] = []
    localized = any("global" in node.meta for node in graph.find_nodes(op="placeholder"))
    for node, name, identifier, times in _walk(graph, "", 1):
        prefix = identifier.removesuffix(node.name)
        nodes.append(_facts(node, name, identifier, len(nodes), times, context, localized=localized))
        edges += [Edge(prefix + given.name, identifier, number) for number, given in enumerate(node.all_input_nodes)]
        if (loop := loop_of(node)) is not None:
            inner = loop.body.graph.find_nodes(op="placeholder", sort=True)
            edges += [
                Edge(prefix + operand.name, f"{identifier}/{placeholder.name}", 0)
                for operand, placeholder in zip(node.all_input_nodes, inner, strict=False)
                if operand in node.args
            ]
    return nodes, edges


def _walk(graph: fx.Graph, prefix: str, times: int) -> Iterator[tuple[fx.Node, str, str, int]]:
    for node, name in labels(graph).items():
        yield node, name, prefix + node.name, times
        if (loop := loop_of(node)) is not None:
            yield from _walk(loop.body.graph, f"{prefix}{node.name}/", times * loop.micro_batches)


def _facts(
    node: fx.Node, name: str, identifier: str, at: int, times: int, context: Context, *, localized: bool
) -> NodeFacts:
    value, sbp, where, moved = node.meta.get("val"), meta(node).get("sbp"), origin(node), boxing_of(node)
    is_tensor = isinstance(value, Tensor)
    here = tuple(value.shape) if isinstance(value, Tensor) else ()
    whole = meta(node).get("global", here) if localized else here
    if isinstance(value, Tensor) and not localized and sbp is not None:
        here = local_shape(here, sbp, context.mesh if len(sbp) == context.mesh.dims else context.with_time_dim().mesh)
    count = 1
    for size in here:
        count *= size
    given = role(node)
    return NodeFacts(
        id=identifier,
        label=name,
        kind=_kind(node),
        operator=operator_name(node) if given is None else given.kind,
        phase=where.phase if "origin" in node.meta else "",
        module=where.module,
        source=where.source,
        code=where.code,
        dtype=dtype_name(value.dtype) if isinstance(value, Tensor) else "",
        sbp=show(sbp) if is_tensor and sbp is not None else "",
        shape=str(tuple(whole)) if is_tensor else "",
        local_shape=str(tuple(here)) if is_tensor else "",
        bytes=count * value.element_size() if isinstance(value, Tensor) else 0,
        at=at,
        times=times,
        boxing="" if moved is None else moved.kind,
        tensor=str(tensor_moved(node) or ""),
        sent=0 if moved is None else round(moved.sent),
        parameter=given.name if given is not None and given.kind == "parameter" else meta(node).get("parameter", ""),
    )


def _kind(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return "output"
    if loop_of(node) is not None:
        return "loop"
    if is_boxing(node):
        return "boxing"
    return "wait" if is_wait(node) else "compute"
