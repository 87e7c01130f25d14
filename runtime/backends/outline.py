"""Make functions of runs of nodes, which a backend then calls in another way, as a CUDA graph for instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zerograph import _torch

Outline = tuple[Callable[..., Sequence[Any]], list[fx.Node], list[fx.Node]]


def outline(module: fx.GraphModule, run: Sequence[fx.Node]) -> Outline:
    """Return a function that computes a run of nodes, the nodes that it takes, and those whose values it returns.

    Args:
        module: the graph.
        run: nodes of it, one after the other.
    """
    graph, own = fx.Graph(), set(run)
    inputs = list(dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in own))
    values = {source: graph.placeholder(source.name) for source in inputs}
    for node in run:
        # The name leads from a line that fails back to the emitted graph.
        values[node] = graph.node_copy(node, values.__getitem__)
    outputs = [node for node in run if any(user not in own for user in node.users)]
    graph.output(tuple(values[node] for node in outputs))
    # Not the module: GraphModule.__call__ drops the traceback that names the failed node.
    function: Callable[..., Sequence[Any]] = _torch.graph_module(module, graph).forward
    return function, inputs, outputs
