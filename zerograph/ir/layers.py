"""Layers of a model: repeated modules, whose operators a backend compiles together, and once for all of them."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import fx

from zerograph.ir.alias import is_view
from zerograph.ir.metadata import origin

# Nodes of the forward pass of the smallest module that counts as a layer.
_SMALLEST_LAYER = 12


def layers_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the layer of each node that belongs to one: a numbered module whose forward pass occurs more than once."""
    forward: dict[str, list[str]] = defaultdict(list)
    paths: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        module = origin(node).module
        if module not in paths:
            parts = module.split(".")
            paths[module] = tuple(".".join(parts[: end + 1]) for end, part in enumerate(parts) if part.isdigit())
        if origin(node).phase == "forward" and not is_view(node):
            for path in paths[module]:
                forward[path].append(str(node.target))
    operators = {path: tuple(targets) for path, targets in forward.items() if len(targets) >= _SMALLEST_LAYER}
    count = Counter(operators.values())
    layers = {path for path, targets in operators.items() if count[targets] > 1}
    outermost = {module: next((path for path in of if path in layers), "") for module, of in paths.items()}
    return {node: outermost[origin(node).module] for node in graph.nodes if origin(node).module}
