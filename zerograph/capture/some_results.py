"""Gradients of some results only: what backward computes from the others is left out, as autograd leaves it out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.capture.captured import Captured
from zerograph.ir.metadata import Role, meta
from zerograph.ir.pause import GRADIENT_OF
from zerograph.ir.rewrite import drop_unused, replace_node
from zerograph.ir.step_graph import output_nodes, writes
from zerograph.passes.pipeline import copy_graph


def of_results(captured: Captured, places: Collection[int]) -> Captured:
    """Return a captured graph whose backward starts from some results only.

    Backward is linear in the gradients of results, so what only the others reach is zero. There autograd has no
    gradient at all: a parameter that only they reach gets none. Where an operator needs such a zero beside another
    gradient, the graph still asks for it.

    Args:
        captured: the graph of all results, with one ``gradient_of`` for each.
        places: the numbers of the results whose gradients the loop computes.
    """
    graph = copy_graph(captured.graph.graph)
    zeros: set[fx.Node] = set()
    flowing: set[fx.Node] = set()
    for node in list(graph.nodes):
        inputs = [one for one in node.all_input_nodes if one in flowing]
        absent = [one for one in inputs if one in zeros]
        if node.op == "output":
            break
        if node.target is GRADIENT_OF or inputs:
            flowing.add(node)
        if node.target is GRADIENT_OF:
            absent, inputs = ([], []) if node.args[1] in places else ([node], [node])
        if absent and len(absent) == len(inputs):
            zeros.add(node)
        elif absent and _is_sum(node):
            (other,) = (one for one in node.all_input_nodes if one not in zeros)
            replace_node(node, other)
    for copy, _, value in list(writes(graph)):
        if value in zeros:
            graph.erase_node(copy)
    return _without_outputs(captured, _torch.graph_module(captured.graph, graph), zeros)


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two tensors of one kind."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    values = [one.meta["val"] for one in (node, *node.all_input_nodes)]
    # As text: symbolic sizes have no hash.
    return all(isinstance(one, Tensor) for one in values) and len({(str(one.shape), one.dtype) for one in values}) == 1


def _without_outputs(captured: Captured, module: fx.GraphModule, zeros: Collection[fx.Node]) -> Captured:
    """Drop the outputs that are zeros: gradients of parameters, and tensors that ``build()`` returns."""
    graph = module.graph
    output = graph.output_node()
    pairs = list(zip(output_nodes(graph), meta(output)["roles"], strict=True))
    tensors = iter([node for node, role in pairs if role.kind == "output"])
    returned = [None if leaf is Tensor and next(tensors) in zeros else leaf for leaf in captured.returned]
    kept = [(node, role) for node, role in pairs if node not in zeros]
    gone = {role.name for node, role in pairs if node in zeros and role.kind == "gradient"}
    numbers = iter(range(len(kept)))
    roles = [Role("output", str(next(numbers))) if role.kind == "output" else role for _, role in kept]
    output.args = (tuple(node for node, _ in kept),)
    meta(output)["roles"] = roles
    drop_unused(graph)
    module.recompile()
    gradients = tuple(name for name in captured.gradients if name not in gone)
    return replace(captured, graph=module, returned=tuple(returned), gradients=gradients)
