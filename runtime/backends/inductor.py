"""Compile every distinct piece of the emitted graph once with Inductor; the other operators run as they are."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import SymInt, Tensor, fx

from zerograph import _torch
from zerograph.base.source import warn_user
from zerograph.errors import CaptureError
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.backends.compile_cache import share
from zerograph.runtime.backends.pieces import Piece, Program, by_tensors, cut
from zerograph.runtime.backends.regions import cut_regions
from zerograph.runtime.offload.threads import offloads, threads, update_threads

# Takes one list of inputs, and clears it to free what nothing else holds.
Function = Callable[[list[Any]], Sequence[Any]]
Cut = Callable[[fx.Graph], Program]


def compile_pieces(graph: fx.GraphModule, cutter: Cut | None = None) -> fx.GraphModule:
    """Return the graph with one call for each piece. Values are still freed after their last use.

    Args:
        graph: the emitted graph.
        cutter: cuts a graph into pieces; None: into regions on an accelerator, into chains of loops on the CPU, where
            products gain nothing by a compiler.

    Raises:
        CaptureError: Inductor could not compile a piece of static sizes; the message names its modules and lines.
    """
    loop_nodes = [node for node in graph.graph.nodes if loop_of(node) is not None]
    graphs = [graph, *(meta(node)["loop"].body for node in loop_nodes)]
    if cutter is None:
        cutter = cut_regions if _on_accelerator(graph) else cut
    programs = [cutter(source.graph) for source in graphs]
    keys = {step: signature(step) for program in programs for step in program if isinstance(step, Piece)}
    distinct = {key: piece for piece, key in reversed(keys.items())}
    tasks = {key: lambda piece=piece: _compile(piece) for key, piece in reversed(distinct.items())}
    # Loops for the CPU have the number of threads in their code.
    with threads(update_threads()) if offloads(graph.graph) else contextlib.nullcontext():
        functions = share(tasks)
    by_piece = {piece: functions[key] for piece, key in keys.items()}
    compiled, *bodies = [emit(source, program, by_piece) for source, program in zip(graphs, programs, strict=True)]
    for node, body in zip(loop_nodes, bodies, strict=True):
        # Loops call the function of a body that has its code.
        compiled.set_submodule(str(node.target), meta(node)["loop"].with_body(fx.GraphModule(body, body.graph)))
    return compiled


def _on_accelerator(graph: fx.GraphModule) -> bool:
    values = (node.meta.get("val") for node in placeholders(graph.graph))
    return any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values)


def signature(piece: Piece) -> str:
    """Return a digest of the piece without its names: operators, their arguments, and kinds of input tensors."""
    numbers = {node: number for number, node in enumerate([*piece.inputs, *piece.nodes])}

    def shown(value: Any) -> str:
        return repr(fx.map_arg(value, lambda node: _Number(numbers[node])))

    lines = [_describe(node.meta["val"]) for node in piece.inputs]
    for node in piece.nodes:
        _, args, kwargs = by_tensors(node)
        lines.append(f"{node.target} {shown(args)} {shown(kwargs)}")
    lines.append(shown(tuple(piece.outputs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Number(int):
    """The number of a node, printed so that it differs from an argument that is a number."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"


def _compile(piece: Piece) -> Function:
    """Compile a piece. One with symbolic sizes that Inductor cannot compile runs operator by operator, with a warning.

    Raises:
        CaptureError: Inductor could not compile a piece of static sizes.
    """
    module, values = _module(piece), [node.meta["val"] for node in piece.inputs]
    symbols = [value for value in values if _torch.is_symbol(value)]
    environment = _torch.separate_env(symbols) if symbols else None
    # What reads them outside was traced with these strides.
    strides = [] if symbols else [node.meta["val"].stride() for node in piece.outputs]
    try:
        compiled = _torch.inductor(module, values, environment, strides)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}\nThe piece is {piece.where()}"
        if environment is None:
            raise CaptureError(
                f"the backend 'inductor' could not compile the step: {reason}\n"
                "config.backend = 'eager' runs the same graph without compiling it."
            ) from error
        warn_user(
            f"Inductor could not compile a piece of the step for all sizes; it runs operator by operator: {reason}\n"
            "config.dynamic_shapes = False compiles each size by itself, for ranks with equally many rows."
        )
        return _operators(module)
    if environment is None:
        return compiled
    return _guarded(compiled, _operators(module), symbols, _torch.conditions(environment), piece)


def _operators(module: fx.GraphModule) -> Function:
    """Return a function that runs a piece operator by operator."""

    # A graph calls functions by their names, which a bound method shares with others.
    def run_operators(inputs: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = module.forward(*inputs)
        return outputs

    return run_operators


def _guarded(
    compiled: Function, operators: Function, symbols: Sequence[SymInt], conditions: Sequence[str], piece: Piece
) -> Function:
    """Return a function that runs compiled code for sizes that it is valid for, and operators for others.

    Args:
        symbols: the sizes that are the first inputs.
        conditions: what the compiled code relies on, over the names of the symbols.
    """
    conditions = [f"({condition})" for condition in conditions]
    count, names = len(symbols), ", ".join(map(str, symbols))
    not_empty = [f"{symbol} > 0" for symbol in symbols if _torch.is_positive(symbol)]
    is_empty = eval(f"lambda {names}: not ({' and '.join(not_empty) or True})")
    is_valid = eval(f"lambda {names}: {' and '.join([*not_empty, *conditions]) or True}", {"math": math})
    warned = False

    def run_inductor(inputs: list[Any]) -> Sequence[Any]:
        nonlocal warned
        sizes = tuple(inputs[:count])
        if is_valid(*sizes):
            return compiled(inputs)
        if not warned and not is_empty(*sizes):
            warned = True
            warn_user(
                f"code that Inductor compiled for {' and '.join(conditions)} does not serve ({names}) = {sizes}: for "
                f"such sizes its operators run one by one\nThe piece is {piece.where()}"
            )
        return operators(inputs)

    return run_inductor


def _module(piece: Piece) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {node: graph.placeholder(f"input{number}") for number, node in enumerate(piece.inputs)}
    for node in piece.nodes:
        target, args, kwargs = by_tensors(node)
        args, kwargs = fx.map_arg((args, kwargs), nodes.__getitem__)
        nodes[node] = graph.call_function(target, args, kwargs)
    graph.output(tuple(nodes[node] for node in piece.outputs))
    return fx.GraphModule({}, graph)


def _listed(*values: Any) -> list[Any]:
    return list(values)


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
        # The list is all that holds a value which nothing reads later: the call frees it before it ends.
        inputs = graph.call_function(_listed, tuple(nodes[node] for node in step.inputs))
        call = graph.call_function(functions[step], (inputs,))
        # For profiles and messages, in which the name of a piece means nothing.
        meta(call)["compiled"] = tuple(node.name for node in step.nodes)
        for number, output in enumerate(step.outputs):
            nodes[output] = graph.create_node("call_function", getitem, (call, number), name=output.name)
        for node in step.nodes:
            written = _torch.written_arguments(node)
            if written and written[0] in nodes:
                nodes[node] = nodes[written[0]]
    graph.output(fx.map_arg(source.graph.output_node().args[0], nodes.__getitem__))
    return _torch.graph_module(source, graph)
