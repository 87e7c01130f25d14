"""The graph as text for readers and for diffs: one node per line.

::

    input  bucket0  f32 S(0) (29696) -> (14848)
    >>     bucket0:all_gather_into_tensor = all-gather S(0) -> B (bucket0), sends 59,392 bytes  f32 B (29696)  # forward
           model.up:addmm_2 = addmm(model.up.bias, view_5, t_3)  f32 S(0) (96, 128) -> (48, 128)  # forward train.py:53

After the operator come dtype, SBP, global shape and, if it differs, this rank's shape; then phase and source line. A
line does not depend on its position, and nodes keep their names from pass to pass, so equal nodes have equal lines.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.errors import ConfigError, did_you_mean
from zerograph.inspection.names import input_name, is_wait, kind, reference, within
from zerograph.inspection.node_table import NodeTable, Row
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.metadata import boxing_of, meta, origin, role
from zerograph.ir.sbp import NdSbp, show
from zerograph.passes.context import Context

_MARKS = {"input": "input ", "boxing": ">>    ", "wait": "<<    "}
_NO_MARK = "      "


class Line(NamedTuple):
    """One node as text, without line end, and the qualified name of its module, or of the parameter that it is."""

    text: str
    module: str


def lines(graph: fx.Graph, context: Context) -> list[Line]:
    """Return every node of the graph in order; nodes of a loop's body come after the loop, indented."""
    table = NodeTable(graph)
    return [_line(row, table, context) for row in table]


def _line(row: Row, table: NodeTable, context: Context) -> Line:
    node, indent = row.node, "  | " * len(row.loops)
    if node.op == "output":
        return Line(f"{indent}{_NO_MARK} return {_returned(node)}", "")
    call = "" if node.op == "placeholder" else f" = {_call(node)}"
    value = _value(node, table, context)
    text = f"{indent}{_MARKS.get(kind(node), _NO_MARK)} {row.label}{call}{f'  {value}' if value else ''}{_where(node)}"
    graph_input = role(node)
    return Line(text, origin(node).module if graph_input is None else graph_input.name)


def show_text(lines: Sequence[Line], module: str | None = None) -> str:
    """Join lines to one text: all of them, or those of one module.

    Raises:
        ConfigError: no node belongs to the module.
    """
    if module is None:
        return "\n".join(line.text for line in lines)
    selected = [line.text for line in lines if within(line.module, module)]
    if not selected:
        modules = {path for line in lines for path in _ancestors(line.module)}
        raise ConfigError(f"no node of this graph belongs to the module {module!r}{did_you_mean(module, modules)}")
    return "\n".join(selected)


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _call(node: fx.Node) -> str:
    moved = boxing_of(node)
    if moved is not None:
        source = ", ".join(map(reference, node.all_input_nodes))
        along = f" along mesh dimension {moved.dim}" if len(moved.source) > 1 else ""
        sent = f", sends {round(moved.sent):,} bytes" if moved.sent else ""
        sent += f" in {moved.format}" if moved.format else ""
        return f"{moved.kind} {show(moved.source)} -> {show(moved.target)}{along} ({source}){sent}"
    if is_wait(node):
        return f"wait({reference(node.all_input_nodes[0])})"
    if node.target is operator.getitem:
        return f"{_shown(node.args[0])}[{node.args[1]}]"
    if (loop := loop_of(node)) is not None:
        return f"loop over {loop.micro_batches} micro-batches ({_operands(node, loop)})"
    options = [f"{name}={_shown(value)}" for name, value in node.kwargs.items() if name not in _IMPLIED]
    return f"{operator_name(node)}({', '.join([*map(_shown, node.args), *options])})"


# Shown by the value's dtype and shape already.
_IMPLIED = ("pin_memory", "layout", "dtype", "memory_format")


def _operands(node: fx.Node, loop: Loop) -> str:
    # The sizes that follow the tensors are shown in the shapes of the body.
    operands = zip(node.args, loop.cuts, strict=False)
    return ", ".join(f"{_shown(operand)}{'' if cut is None else ' cut'}" for operand, cut in operands)


def operator_name(node: fx.Node) -> str:
    """Return ``mm``, ``mm.out``, ``zerograph.accumulate``: without ``aten`` and the default overload."""
    if isinstance(node.target, OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    return str(getattr(node.target, "__name__", node.target))


def _shown(value: Any) -> str:
    if isinstance(value, fx.Node):
        return reference(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return str(value)


def _value(node: fx.Node, table: NodeTable, context: Context) -> str:
    value, sbp = node.meta.get("val"), meta(node).get("sbp")
    if (size := meta(node).get("size")) is not None:
        return str(size)
    if not isinstance(value, Tensor):
        return ""
    shown = shapes(*table.shapes(node, context))
    return " ".join(filter(None, (dtype_name(value.dtype), "" if sbp is None else show(sbp), shown)))


def shapes(shape: Sequence[int] | None, local: Sequence[int]) -> str:
    """Show a global shape and, if it differs, this rank's; a value without a global shape is ``local``."""
    if shape is None:
        return f"local {show_shape(local)}"
    return show_shape(shape) if tuple(shape) == tuple(local) else f"{show_shape(shape)} -> {show_shape(local)}"


def show_shape(shape: Sequence[int]) -> str:
    """Return ``(96, 128)``; also ``(96)`` for one dimension."""
    return f"({', '.join(map(str, shape))})"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: ``f32``, ``bf16``, ``i64``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return f"{short}{name.removeprefix(long)}"
    return name


def _where(node: fx.Node) -> str:
    if "origin" not in node.meta:
        return ""
    where = origin(node)
    again = " (again)" if meta(node).get("recomputed") else ""
    fused = " (fused)" if meta(node).get("fused") else ""
    return f"  # {where.phase}{again}{fused} {where.source}".rstrip()


def _returned(node: fx.Node) -> str:
    # A body returns nothing: it writes its results to its inputs.
    returned = node.args[0]
    needs: Sequence[NdSbp] = meta(node).get("needs", ())
    roles = meta(node).get("roles", ())
    shown = []
    values = returned if isinstance(returned, (list, tuple)) else []
    for index, value in enumerate(value for value in values if isinstance(value, fx.Node)):
        name = f"{input_name(roles[index])}: " if index < len(roles) else ""
        sbp = f" {show(needs[index])}" if index < len(needs) else ""
        shown.append(f"{name}{reference(value)}{sbp}")
    return ", ".join(shown) or "nothing"
