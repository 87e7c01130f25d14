"""Compile a graph of this rank's shapes to a function of this rank's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from zerograph import _torch
from zerograph.ir.loop import loop_of, loops
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.backends.coded_kernels import compile_updates
from zerograph.runtime.backends.cudagraph import as_cuda_graph
from zerograph.runtime.backends.inductor import compile_pieces
from zerograph.runtime.backends.pieces import cut_exactly

Compiled = Callable[..., Sequence[Any]]
Backend = Callable[[fx.GraphModule, list[Any]], Compiled]


def compile_graph(backend: Backend, graph: fx.GraphModule, *, exact: bool = False) -> Compiled:
    """Compile a graph with a backend.

    A user's backend gets a copy of the graph without our metadata, and fake tensors of this rank's shapes.

    Args:
        exact: Inductor compiles only what rounds alike in pieces of any size.
    """
    compile_updates(graph)
    if backend is inductor and exact:
        return eager(compile_pieces(graph, cut_exactly), [])
    if backend in BACKENDS.values():
        return backend(graph, [])
    return _compile_copy(backend, graph) if not any(loops(graph.graph)) else _compile_in_parts(backend, graph)


def _compile_copy(backend: Backend, graph: fx.GraphModule) -> Compiled:
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
        # The name leads from a line that fails back to the emitted graph.
        nodes[node] = copy.create_node(node.op, node.target, args, kwargs, name=node.name)
    inputs = [node.meta["val"] for node in placeholders(graph.graph)]
    return backend(fx.GraphModule(graph, copy), list(_torch.fake_inputs(inputs)))


def _compile_in_parts(backend: Backend, graph: fx.GraphModule) -> Compiled:
    """Compile the parts before a loop, its body, and those after it one by one: a backend gets graphs without loops."""
    part = 0
    parts: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.target is getitem and loop_of(node.all_input_nodes[0]) is not None:
            # Functions of backends take and return tensors: the results of a loop leave its part one by one.
            parts[node] = parts[node.all_input_nodes[0]]
            continue
        is_loop = loop_of(node) is not None
        part += is_loop
        parts[node] = part
        part += is_loop
    whole = split_module(graph, graph, parts.__getitem__, keep_original_order=True)
    for name, submodule in list(whole.named_children()):
        assert isinstance(submodule, fx.GraphModule)
        loop = next(loops(submodule.graph), None)
        if loop is None:
            whole.set_submodule(name, _Part(backend, submodule))
        else:
            (call,) = submodule.graph.find_nodes(op="call_module")
            submodule.set_submodule(str(call.target), loop.with_body(loop.body, _compile_copy(backend, loop.body)))
    return eager(whole, [])


class _Part(torch.nn.Module):
    """A compiled part, which returns one value or a tuple, as the part does."""

    def __init__(self, backend: Backend, part: fx.GraphModule) -> None:
        super().__init__()
        output = part.graph.output_node()
        self.returns_one = isinstance(output.args[0], fx.Node)
        if self.returns_one:
            output.args = ((output.args[0],),)
            part.recompile()
        self.function = _compile_copy(backend, part)

    def forward(self, *inputs: Any) -> Any:
        results = self.function(*inputs)
        return results[0] if self.returns_one else results


def eager(graph: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    """Run the graph's nodes one by one and free each value after its last use."""
    # Not ``graph``: GraphModule.__call__ drops the traceback that names the failed node.
    function: Compiled = graph.forward
    return function


def inductor(graph: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    """Fuse the operators between products and collectives with Inductor; equal pieces compile once.

    Results differ from eager's by about 1e-8.
    """
    return eager(compile_pieces(graph), example_inputs)


def cudagraph(graph: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    """Compile as :func:`inductor`, and replay what is between two collectives as one CUDA graph."""
    return as_cuda_graph(graph, compile_pieces(graph))


BACKENDS: dict[str, Backend] = {"eager": eager, "inductor": inductor, "cudagraph": cudagraph}


def resolve(backend: str | Backend, device: torch.device) -> tuple[str, Backend]:
    """Return the name of the backend and the backend.

    ``"auto"`` is Inductor on accelerators, and eager on CPU, where Inductor is no faster.
    """
    if callable(backend):
        return getattr(backend, "__name__", type(backend).__name__), backend
    name = backend if backend != "auto" else "eager" if device.type == "cpu" else "inductor"
    return name, BACKENDS[name]
