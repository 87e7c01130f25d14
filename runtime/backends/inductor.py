"""The inductor backend: every distinct piece of the emitted graph is compiled once, the rest runs as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import Tensor, fx

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import meta
from zerograph.runtime.backends.compile_cache import share
from zerograph.runtime.backends.pieces import Piece, cut

Function = Callable[..., Sequence[Any]]


def compile_pieces(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with one call for each piece; values are freed behind their last use, as in the graph itself.

    Raises:
        CaptureError: Inductor refused a piece; the message names the modules and lines that it comes from.
    """
    loops = [node for node in graph.graph.nodes if loop_of(node) is not None]
    graphs = [graph, *(meta(node)["loop"].body for node in loops)]
    programs = [cut(one.graph) for one in graphs]
    keys = {one: signature(one) for program in programs for one in program if isinstance(one, Piece)}
    distinct = {key: one for one, key in reversed(keys.items())}
    tasks = {key: lambda piece=piece: _compiled(piece) for key, piece in reversed(distinct.items())}
    functions = share(tasks)
    known = {piece: functions[key] for piece, key in keys.items()}
    found, *bodies = [emit(one, program, known) for one, program in zip(graphs, programs, strict=True)]
    for node, body in zip(loops, bodies, strict=True):
        found.set_submodule(str(node.target), meta(node)["loop"].with_body(body))
    return found


def signature(piece: Piece) -> str:
    """Equal for pieces that are equal up to names: the same operators on the same kinds of tensors, wired alike."""
    numbers = {node: number for number, node in enumerate([*piece.inputs, *piece.nodes])}

    def shown(value: Any) -> str:
        return repr(fx.map_arg(value, lambda node: _Number(numbers[node])))

    lines = [_kind(node.meta["val"]) for node in piece.inputs]
    lines += [f"{node.target} {shown(node.args)} {shown(dict(node.kwargs))}" for node in piece.nodes]
    lines.append(shown(tuple(piece.outputs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Number(int):
    """An argument that is another node, told from one that is a number."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def _compiled(piece: Piece) -> Function:
    graph = fx.Graph()
    nodes = {node: graph.placeholder(f"input{number}") for number, node in enumerate(piece.inputs)}
    for node in piece.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), nodes.__getitem__)
        nodes[node] = graph.create_node("call_function", node.target, args, kwargs)
    graph.output(tuple(nodes[node] for node in piece.outputs))
    try:
        return _torch.inductor(fx.GraphModule({}, graph), [node.meta["val"] for node in piece.inputs])
    except Exception as error:
        raise CaptureError(
            f"the backend 'inductor' could not compile the step: {type(error).__name__}: {error}\n"
            f"It is about {piece.where()}\n"
            "config.backend = 'eager' runs the same graph without compiling it."
        ) from error


def emit(
    source: fx.GraphModule, program: Sequence[fx.Node | Piece], functions: Mapping[Piece, Function]
) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for one in program:
        if isinstance(one, fx.Node):
            args, kwargs = fx.map_arg((one.args, dict(one.kwargs)), nodes.__getitem__)
            # Its name leads from the line that failed back to the emitted graph.
            nodes[one] = graph.create_node(one.op, one.target, args, kwargs, name=one.name)
            nodes[one].meta = one.meta
            continue
        call = graph.call_function(functions[one], tuple(nodes[node] for node in one.inputs))
        # Its own name says nothing to those who look at what ran.
        meta(call)["compiled"] = tuple(node.name for node in one.nodes)
        for number, output in enumerate(one.outputs):
            nodes[output] = graph.create_node("call_function", getitem, (call, number), name=output.name)
        for node in one.nodes:
            written = _torch.written_arguments(node)
            if written and written[0] in nodes:
                nodes[node] = nodes[written[0]]
    graph.output(fx.map_arg(source.graph.output_node().args[0], nodes.__getitem__))
    return fx.GraphModule(source, graph)
