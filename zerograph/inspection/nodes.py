"""Attributes of nodes as plain numbers and text, for exports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from zerograph.inspection.names import is_boxing, is_wait, labels, tensor_moved
from zerograph.inspection.sequence import Position, loop_inputs, positions
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.loop import loop_of
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import boxing_of, meta, origin, role
from zerograph.ir.sbp import show
from zerograph.ir.sizes import largest
from zerograph.passes.context import Context

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class NodeFacts:
    """Attributes of a node: numbers and text only, which every file format can hold.

    Attributes:
        id: the node's name in the graph; in the body of a loop, prefixed with the loop's name and a slash.
        label: module path and name, see :mod:`zerograph.inspection.names`.
        kind: ``"input"``, ``"compute"``, ``"boxing"``, ``"wait"``, ``"loop"`` or ``"output"``.
        operator: ``mm``, ``mm.out``, ...; of an input its kind: ``parameter``, ``bucket``, ``state``, ...
        phase, module: origin of the node.
        source: the user's ``file:line``; ``code`` is the text of that line.
        dtype, sbp, shape, local_shape: of its value; empty if it returns several tensors, or none.
        bytes: size of its value on this rank, at the largest dynamic dimensions seen or declared; 0 likewise.
        at: index in the graph, from 0; bodies of loops count once.
        times: number of runs per step.
        boxing: ``all-gather`` and so on if the node changes an SBP, else empty.
        tensor: the tensor that it moves: ``bucket0``, ``gradient of bucket0``, ...
        sent: bytes that each rank sends.
        parameter: the parameter that it is, or is a view of; else empty.
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
        """Return all attributes but the id, by name."""
        attributes = asdict(self)
        del attributes["id"]
        return attributes


@dataclass(frozen=True)
class Edge:
    """A value that the node ``target`` reads from ``source``, by ids; ``argument`` is its number among the inputs."""

    source: str
    target: str
    argument: int


def to_networkx(graph: fx.Graph, context: Context) -> networkx.MultiDiGraph[str]:
    """Return a graph whose nodes have the attributes of :class:`zerograph.inspection.nodes.NodeFacts`.

    Nodes are named by ``id``. An edge leads from a node to a reader of its value; its attribute ``argument`` is the
    value's number among the reader's inputs. An operand of a loop has edges to the loop and to the input of its body.
    """
    import networkx

    nodes, edges = facts(graph, context)
    exported: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    exported.add_nodes_from((node.id, node.as_dict()) for node in nodes)
    exported.add_edges_from((edge.source, edge.target, {"argument": edge.argument}) for edge in edges)
    return exported


def facts(graph: fx.Graph, context: Context) -> tuple[list[NodeFacts], list[Edge]]:
    """Return the nodes of a graph and of the bodies of its loops, in order, and their dataflow."""
    nodes: list[NodeFacts] = []
    edges: list[Edge] = []
    localized = any("global" in node.meta for node in graph.find_nodes(op="placeholder"))
    names: dict[fx.Node, str] = {}
    for position in positions(graph):
        node = position.node
        if node not in names:
            names |= labels(node.graph)
        prefix = "".join(f"{loop.name}/" for loop in position.loops)
        identifier = prefix + node.name
        nodes.append(_facts(position, names[node], identifier, context, localized=localized))
        edges += [Edge(prefix + source.name, identifier, number) for number, source in enumerate(node.all_input_nodes)]
        if loop_of(node) is not None:
            inputs = [(prefix + operand.name, f"{identifier}/{inner.name}") for operand, inner in loop_inputs(node)]
            edges += [Edge(source, target, 0) for source, target in inputs]
    return nodes, edges


def _facts(position: Position, name: str, identifier: str, context: Context, *, localized: bool) -> NodeFacts:
    node = position.node
    value, sbp, where, moved = node.meta.get("val"), meta(node).get("sbp"), origin(node), boxing_of(node)
    is_tensor = isinstance(value, Tensor)
    local = tuple(value.shape) if isinstance(value, Tensor) else ()
    shape = meta(node).get("global", local) if localized else local
    if isinstance(value, Tensor) and not localized and sbp is not None:
        local = local_shape(local, sbp, context.mesh if len(sbp) == context.mesh.dims else context.with_time_dim().mesh)
    graph_input = role(node)
    parameter = meta(node).get("parameter", "")
    return NodeFacts(
        id=identifier,
        label=name,
        kind=_kind(node),
        operator=operator_name(node) if graph_input is None else graph_input.kind,
        phase=where.phase if "origin" in node.meta else "",
        module=where.module,
        source=where.source,
        code=where.code,
        dtype=dtype_name(value.dtype) if isinstance(value, Tensor) else "",
        sbp=show(sbp) if is_tensor and sbp is not None else "",
        shape=str(tuple(shape)) if is_tensor else "",
        local_shape=str(local) if is_tensor else "",
        bytes=math.prod(largest(local)) * value.element_size() if isinstance(value, Tensor) else 0,
        at=position.index,
        times=position.times,
        boxing="" if moved is None else moved.kind,
        tensor=str(tensor_moved(node) or ""),
        sent=0 if moved is None else round(moved.sent),
        parameter=graph_input.name if graph_input is not None and graph_input.kind == "parameter" else parameter,
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
