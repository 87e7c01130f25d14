"""From a graph with this rank's shapes to something that can be called with this rank's tensors."""

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
from zerograph.runtime.backends.inductor import compile_pieces

Compiled = Callable[..., Sequence[Any]]
Backend = Callable[[fx.GraphModule, list[Any]], Compiled]


def compile_graph(backend: Backend, graph: fx.GraphModule) -> Compiled:
    """Hand a graph to a backend: a copy of its own, without our metadata, and fake tensors of this rank's shapes."""
    if backend is eager:
        return eager(graph, [])
    if backend is inductor:
        return eager(compile_pieces(graph), [])
    return _handed(backend, graph) if not any(loops(graph.graph)) else _handed_in_parts(backend, graph)


def _handed(backend: Backend, graph: fx.GraphModule) -> Compiled:
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
        # Its name leads from the line that failed back to the emitted graph.
        nodes[node] = copy.create_node(node.op, node.target, args, kwargs, name=node.name)
    inputs = [node.meta["val"] for node in placeholders(graph.graph)]
    return backend(fx.GraphModule(graph, copy), list(_torch.fake_inputs(inputs)))


def _handed_in_parts(backend: Backend, graph: fx.GraphModule) -> Compiled:
    """A backend is given what stands before a loop, its body, and what stands behind it: graphs without loops."""
    part = 0
    parts: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.target is getitem and loop_of(node.all_input_nodes[0]) is not None:
            # A backend takes and gives tensors: what a loop yields leaves it one by one.
            parts[node] = parts[node.all_input_nodes[0]]
            continue
        here = loop_of(node) is not None
        part += here
        parts[node] = part
        part += here
    whole = split_module(graph, graph, parts.__getitem__, keep_original_order=True)
    for name, one in list(whole.named_children()):
        assert isinstance(one, fx.GraphModule)
        found = next(loops(one.graph), None)
        if found is None:
            whole.set_submodule(name, _Part(backend, one))
        else:
            (inner,) = one.graph.find_nodes(op="call_module")
            one.set_submodule(str(inner.target), found.with_body(found.body, _handed(backend, found.body)))
    return eager(whole, [])


class _Part(torch.nn.Module):
    """What a backend made of a part, which yields one value, or several."""

    def __init__(self, backend: Backend, part: fx.GraphModule) -> None:
        super().__init__()
        output = part.graph.output_node()
        self.alone = isinstance(output.args[0], fx.Node)
        if self.alone:
            output.args = ((output.args[0],),)
            part.recompile()
        self.function = _handed(backend, part)

    def forward(self, *inputs: Any) -> Any:
        made = self.function(*inputs)
        return made[0] if self.alone else made


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
