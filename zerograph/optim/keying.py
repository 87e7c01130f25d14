"""Compare updates by their operators, and find the initial value of their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from zerograph.ir.metadata import meta
from zerograph.optim.memory import FACTORIES, root_of


def key_of(graph: fx.GraphModule, returned_state: Sequence[str]) -> str:
    """Return a text of the operators and constants in order, with tensors numbered.

    State that the graph itself creates counts as an input, so a first update may equal a later one.
    """
    names: dict[fx.Node, str] = {}
    output = graph.graph.output_node().args[0]
    for state, node in zip(returned_state, output if isinstance(output, (list, tuple)) else (), strict=False):
        names[_made_at(node)] = state
    lines: list[str] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            names[node] = meta(node)["update_input"]
        elif node.op == "call_function" and node not in names:
            names[node] = f"%{len(lines)}"
            lines.append(f"{node.target} {_shown(node.args, names)} {_shown(node.kwargs, names)}")
    return "\n".join(lines)


def _shown(argument: Any, names: Mapping[fx.Node, str]) -> str:
    return str(fx.map_arg(argument, lambda node: names.get(node, str(node))))


def _made_at(node: fx.Node) -> fx.Node:
    """Return :func:`root_of` the node; for a constant, the node that copies it."""
    root = root_of(node)
    return next(iter(root.users)) if root.op == "get_attr" else root


def initial_value(first: fx.GraphModule, index: int) -> float | None:
    """Return the constant value of a result of the first update, or None if it is computed."""
    returned = first.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    result = returned[index]
    assert isinstance(result, fx.Node)
    root = root_of(result)
    if root.op == "get_attr":
        constant = getattr(first, str(root.target))
        return float(constant) if isinstance(constant, Tensor) and constant.numel() == 1 else None
    fill = FACTORIES.get(root.target)  # type: ignore[call-overload]
    number = fill(root) if fill else None
    return float(number) if isinstance(number, (int, float)) else None
