"""What makes two updates the same program, and what their state is before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from zerograph.ir.metadata import meta
from zerograph.optim.memory import FACTORIES, root_of


def key_of(graph: fx.GraphModule, returned_state: Sequence[str]) -> str:
    """Operators and constants in order, tensors by number; state that the graph itself makes counts as given."""
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
    """As :func:`root_of`, but of a constant its fresh copy: the first node that is the tensor itself."""
    root = root_of(node)
    return next(iter(root.users)) if root.op == "get_attr" else root


def initial_value(first: fx.GraphModule, index: int) -> float | None:
    """Return the constant that this result of the first update is, or None if it is computed."""
    returned = first.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    made = returned[index]
    assert isinstance(made, fx.Node)
    root = root_of(made)
    if root.op == "get_attr":
        constant = getattr(first, str(root.target))
        return float(constant) if isinstance(constant, Tensor) and constant.numel() == 1 else None
    found = FACTORIES.get(root.target)  # type: ignore[call-overload]
    number = found(root) if found else None
    return float(number) if isinstance(number, (int, float)) else None
