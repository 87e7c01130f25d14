"""Compile every distinct piece of the emitted graph once with Inductor; the other operators run as they are."""

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
    """Return the graph with one call for each piece. Values are still freed after their last use.

    Raises:
        CaptureError: Inductor could not compile a piece; the message names its modules and lines.
    """
    loop_nodes = [node for node in graph.graph.nodes if loop_of(node) is not None]
    graphs = [graph, *(meta(node)["loop"].body for node in loop_nodes)]
    programs = [cut(source.graph) for source in graphs]
    keys = {step: signature(step) for program in programs for step in program if isinstance(step, Piece)}
    distinct = {key: piece for piece, key in reversed(keys.items())}
    tasks = {key: lambda piece=piece: _compile(piece) for key, piece in reversed(distinct.items())}
    functions = share(tasks)
    by_piece = {piece: functions[key] for piece, key in keys.items()}
    compiled, *bodies = [emit(source, program, by_piece) for source, program in zip(graphs, programs, strict=True)]
    for node, body in zip(loop_nodes, bodies, strict=True):
        compiled.set_submodule(str(node.target), meta(node)["loop"].with_body(body))
    return compiled


def signature(piece: Piece) -> str:
    """Return a digest of the piece without its names: operators, their arguments, and kinds of input tensors."""
    numbers = {node: number for number, node in enumerate([*piece.inputs, *piece.nodes])}

    def shown(value: Any) -> str:
        return repr(fx.map_arg(value, lambda node: _Number(numbers[node])))

    lines = [_describe(node.meta["val"]) for node in piece.inputs]
    lines += [f"{node.target} {shown(node.args)} {shown(dict(node.kwargs))}" for node in piece.nodes]
    lines.append(shown(tuple(piece.outputs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Number(int):
    """The number of a node, printed so that it differs from an argument that is a number."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def _compile(piece: Piece) -> Function:
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
            f"The piece is {piece.where()}\n"
            "config.backend = 'eager' runs the same graph without compiling it."
        ) from error


def emit(
    source: fx.GraphModule, program: Sequence[fx.Node | Piece], functions: Mapping[Piece, Function]
) -> fx.GraphModule:
    """Return a graph of the program, with one call for each piece.

    Args:
        source: the graph that the program was cut from.
        program: nodes and pieces, in the order in which they run.
        functions: the compiled function of each piece.
    """
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for step in program:
        if isinstance(step, fx.Node):
            args, kwargs = fx.map_arg((step.args, dict(step.kwargs)), nodes.__getitem__)
            # The name leads from a line that fails back to the emitted graph.
            nodes[step] = graph.create_node(step.op, step.target, args, kwargs, name=step.name)
            nodes[step].meta = step.meta
            continue
        call = graph.call_function(functions[step], tuple(nodes[node] for node in step.inputs))
        # For profiles and messages, in which the name of a piece means nothing.
        meta(call)["compiled"] = tuple(node.name for node in step.nodes)
        for number, output in enumerate(step.outputs):
            nodes[output] = graph.create_node("call_function", getitem, (call, number), name=output.name)
        for node in step.nodes:
            written = _torch.written_arguments(node)
            if written and written[0] in nodes:
                nodes[node] = nodes[written[0]]
    graph.output(fx.map_arg(source.graph.output_node().args[0], nodes.__getitem__))
    return fx.GraphModule(source, graph)
