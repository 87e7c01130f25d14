"""The graph as text that a person reads and a diff can compare: one node a line.

::

    input  bucket0  f32 S(0) (29696) -> (14848)
    >>     bucket0:all_gather_into_tensor = all-gather S(0) -> B (bucket0), sends 59,392 bytes  f32 B (29696)  # forward
           model.up:addmm_2 = addmm(model.up.bias, view_5, t_3)  f32 S(0) (96, 128) -> (48, 128)  # forward train.py:53

Behind the operator stand dtype, SBP, global shape and, where it is another, this rank's; then phase and source line.
A line says nothing about its place, and nodes keep their names from pass to pass, so equal nodes have equal lines.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.errors import ConfigError
from zerograph.inspection.names import close_to, input_name, is_boxing, is_wait, labels, reference, within
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import boxing_of, meta, origin, role
from zerograph.ir.sbp import NdSbp, show
from zerograph.passes.context import Context

_MARKS = {"input": "input ", "boxing": ">>    ", "wait": "<<    ", "": "      "}


@dataclass(frozen=True)
class Line:
    """One node as text.

    Attributes:
        text: without line end.
        name: of the node, see :mod:`zerograph.inspection.names`.
        module: the qualified name of the module that the node belongs to, or of the parameter that it is.
        mark: ``"input"``, ``"boxing"``, ``"wait"`` or nothing.
    """

    text: str
    name: str
    module: str
    mark: str = ""


def lines(graph: fx.Graph, context: Context) -> list[Line]:
    """Every node of the graph in order, the nodes of a loop's body behind the loop, further in."""
    return list(_lines(graph, context, ""))


def show_text(found: Sequence[Line], module: str | None = None) -> str:
    """The lines as one text, of all or of what belongs to one module.

    Raises:
        ConfigError: no node belongs to the module.
    """
    if module is not None:
        kept = [one for one in found if within(one.module, module)]
        if not kept:
            known = {path for one in found for path in _ancestors(one.module)}
            raise ConfigError(f"no node of this graph belongs to the module {module!r}{close_to(module, known)}")
        found = kept
    return "\n".join(one.text for one in found)


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _lines(graph: fx.Graph, context: Context, indent: str) -> Iterator[Line]:
    names = labels(graph)
    # Whose values are this rank's already: localize says so on every input.
    localized = any("global" in node.meta for node in graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if node.op == "output":
            yield Line(f"{indent}{_MARKS['']} return {_returned(node)}", "output", "")
            continue
        mark = _mark(node)
        name = names[node]
        what = "" if node.op == "placeholder" else f" = {_what(node)}"
        value = _value(node, context, localized=localized)
        text = f"{indent}{_MARKS[mark]} {name}{what}{f'  {value}' if value else ''}{_where(node)}"
        found = role(node)
        yield Line(text, name, origin(node).module if found is None else found.name, mark)
        if (loop := loop_of(node)) is not None:
            yield from _lines(loop.body.graph, context, f"{indent}  | ")


def _mark(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if is_boxing(node):
        return "boxing"
    return "wait" if is_wait(node) else ""


def _what(node: fx.Node) -> str:
    found = boxing_of(node)
    if found is not None:
        source = ", ".join(map(reference, node.all_input_nodes))
        along = f" along mesh dimension {found.dim}" if len(found.source) > 1 else ""
        sent = f", sends {round(found.sent):,} bytes" if found.sent else ""
        return f"{found.kind} {show(found.source)} -> {show(found.target)}{along} ({source}){sent}"
    if is_wait(node):
        return f"wait({reference(node.all_input_nodes[0])})"
    if node.target is operator.getitem:
        return f"{_shown(node.args[0])}[{node.args[1]}]"
    if (loop := loop_of(node)) is not None:
        return f"loop over {loop.micro_batches} micro-batches ({_operands(node, loop)})"
    options = [f"{name}={_shown(value)}" for name, value in node.kwargs.items() if name not in _IMPLIED]
    return f"{operator_name(node)}({', '.join([*map(_shown, node.args), *options])})"


# What the value says anyway.
_IMPLIED = ("pin_memory", "layout", "dtype", "memory_format")


def _operands(node: fx.Node, loop: Loop) -> str:
    cuts = [f"{_shown(given)}{'' if cut is None else ' cut'}" for given, cut in zip(node.args, loop.cuts, strict=True)]
    return ", ".join(cuts)


def operator_name(node: fx.Node) -> str:
    """``mm``, ``mm.out``, ``zerograph.accumulate``: aten and the overloads that go without saying left out."""
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


def _value(node: fx.Node, context: Context, *, localized: bool) -> str:
    value, sbp = node.meta.get("val"), meta(node).get("sbp")
    if not isinstance(value, Tensor):
        return ""
    here = tuple(value.shape)
    whole = meta(node).get("global") if localized else here
    if not localized and sbp is not None:
        mesh = context.mesh if len(sbp) == context.mesh.dims else context.with_time_dim().mesh
        here = local_shape(here, sbp, mesh)
    return " ".join(filter(None, (dtype_name(value.dtype), "" if sbp is None else show(sbp), shapes(whole, here))))


def shapes(whole: Sequence[int] | None, here: Sequence[int]) -> str:
    """Global shape and, where it is another, this rank's; of what is nothing globally this rank's alone."""
    if whole is None:
        return f"local {_shape(here)}"
    return _shape(whole) if tuple(whole) == tuple(here) else f"{_shape(whole)} -> {_shape(here)}"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def dtype_name(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return f"{short}{name.removeprefix(long)}"
    return name


def _where(node: fx.Node) -> str:
    if "origin" not in node.meta:
        return ""
    found = origin(node)
    again = " (again)" if meta(node).get("recomputed") else ""
    return f"  # {found.phase}{again} {found.source}".rstrip()


def _returned(node: fx.Node) -> str:
    # A body returns nothing: it writes what it leaves.
    returned = node.args[0]
    needs: Sequence[NdSbp] = meta(node).get("needs", ())
    roles = meta(node).get("roles", ())
    shown = []
    given = [one for one in returned if isinstance(one, fx.Node)] if isinstance(returned, (list, tuple)) else []
    for index, one in enumerate(given):
        what = f"{input_name(roles[index])}: " if index < len(roles) else ""
        sbp = f" {show(needs[index])}" if index < len(needs) else ""
        shown.append(f"{what}{reference(one)}{sbp}")
    return ", ".join(shown) or "nothing"
