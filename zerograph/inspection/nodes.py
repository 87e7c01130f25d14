"""Export a graph to networkx."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from zerograph.inspection.names import kind, tensor_moved
from zerograph.inspection.node_table import NodeTable, Row, loop_inputs
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import boxing_of, meta, origin, role
from zerograph.ir.sbp import show
from zerograph.ir.sizes import largest
from zerograph.passes.context import Context

if TYPE_CHECKING:
    import networkx


def to_networkx(graph: fx.Graph, context: Context) -> networkx.MultiDiGraph[str]:
    """Return a graph of the same nodes; those in the body of a loop have the loop's name and a slash before theirs.

    An edge leads from a node to a reader of its value; its attribute ``argument`` is the value's number among the
    reader's inputs. An operand of a loop has edges to the loop and to the input of its body. The attributes of nodes
    are numbers and text only, which every file format can hold:

    - ``label``: module path and name, see :mod:`zerograph.inspection.names`.
    - ``kind``: ``"input"``, ``"compute"``, ``"boxing"``, ``"wait"``, ``"loop"`` or ``"output"``.
    - ``operator``: ``mm``, ``mm.out``, ...; of an input its kind: ``parameter``, ``bucket``, ``state``, ...
    - ``phase``, ``module``: origin of the node.
    - ``source``: the user's ``file:line``; ``code`` is the text of that line.
    - ``dtype``, ``sbp``, ``shape``, ``local_shape``: of its value; empty if it returns several tensors, or none.
    - ``bytes``: size of its value on this rank, at the largest dynamic dimensions seen or declared; 0 likewise.
    - ``at``: index in the graph, from 0; bodies of loops count once.
    - ``times``: number of runs per step.
    - ``boxing``: ``all-gather`` and so on if the node changes an SBP, else empty.
    - ``tensor``: the tensor that it moves: ``bucket0``, ``gradient of bucket0``, ...
    - ``sent``: bytes that each rank sends.
    - ``parameter``: the parameter that it is, or is a view of; else empty.
    """
    import networkx

    table = NodeTable(graph)
    exported: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    exported.add_nodes_from((row.name("/"), _attributes(row, table, context)) for row in table)
    for row in table:
        for number, source in enumerate(row.node.all_input_nodes):
            exported.add_edge(table[source].name("/"), row.name("/"), argument=number)
        for operand, placeholder in loop_inputs(row.node) if loop_of(row.node) is not None else ():
            exported.add_edge(table[operand].name("/"), table[placeholder].name("/"), argument=0)
    return exported


def _attributes(row: Row, table: NodeTable, context: Context) -> dict[str, Any]:
    node, value = row.node, row.node.meta.get("val")
    sbp, where, moved, graph_input = meta(node).get("sbp"), origin(node), boxing_of(node), role(node)
    of_value: dict[str, Any] = {"dtype": "", "sbp": "", "shape": "", "local_shape": "", "bytes": 0}
    if isinstance(value, Tensor):
        shape, local = table.shapes(node, context)
        of_value = {
            "dtype": dtype_name(value.dtype),
            "sbp": "" if sbp is None else show(sbp),
            "shape": str(local if shape is None else shape),
            "local_shape": str(local),
            "bytes": math.prod(largest(local)) * value.element_size(),
        }
    parameter = meta(node).get("parameter", "")
    return {
        "label": row.label,
        "kind": kind(node),
        "operator": operator_name(node) if graph_input is None else graph_input.kind,
        "phase": where.phase if "origin" in node.meta else "",
        "module": where.module,
        "source": where.source,
        "code": where.code,
        **of_value,
        "at": row.index,
        "times": row.times,
        "boxing": "" if moved is None else moved.kind,
        "tensor": str(tensor_moved(node) or ""),
        "sent": 0 if moved is None else round(moved.sent),
        "parameter": graph_input.name if graph_input is not None and graph_input.kind == "parameter" else parameter,
    }
