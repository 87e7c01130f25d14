"""From a graph with this rank's shapes to something that can be called with this rank's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zerograph import _torch
from zerograph.runtime.inductor import compile_pieces
from zerograph.step_graph import placeholders

Compiled = Callable[..., Sequence[Any]]
Backend = Callable[[fx.GraphModule, list[Any]], Compiled]


def compile_graph(backend: Backend, graph: fx.GraphModule) -> Compiled:
    """Hand a graph to a backend: a copy of its own, without our metadata, and fake tensors of this rank's shapes."""
    if backend is eager:
        return eager(graph, [])
    if backend is inductor:
        return eager(compile_pieces(graph), [])
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
        # Its name leads from the line that failed back to the emitted graph.
        nodes[node] = copy.create_node(node.op, node.target, args, kwargs, name=node.name)
    inputs = [node.meta["val"] for node in placeholders(graph.graph)]
    return backend(fx.GraphModule(graph, copy), list(_torch.examples(inputs)))


def eager(graph: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    """Run the graph's nodes one by one, freeing each value behind its last use."""
    # Not graph(): GraphModule's __call__ drops the traceback that tells which node failed.
    function: Compiled = graph.forward
    return function


def inductor(graph: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    """Fuse what lies between products and collectives with Inductor, equal parts once: results 1e-8 off eager's."""
    return eager(compile_pieces(graph), example_inputs)


BACKENDS: dict[str, Backend] = {"eager": eager, "inductor": inductor}


def resolve(backend: str | Backend, device: torch.device) -> tuple[str, Backend]:
    """The backend and its name; ``"auto"`` is Inductor on accelerators and eager on CPU, where it brings no speed."""
    if callable(backend):
        return getattr(backend, "__name__", type(backend).__name__), backend
    name = backend if backend != "auto" else "eager" if device.type == "cpu" else "inductor"
    return name, BACKENDS[name]
