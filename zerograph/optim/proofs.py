"""What is proved of an update from its graph: elementwise or not, each parameter for itself, nothing random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir.alias import viewed
from zerograph.ir.metadata import meta
from zerograph.optim.memory import root_of
from zerograph.optim.sampling import Sample

aten = torch.ops.aten


def mixing(graph: fx.GraphModule) -> str | None:
    """Describe the first operator that makes the update not elementwise, with its line."""
    found: list[fx.Node] = []
    for node in graph.graph.nodes:
        values = [node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes)]
        tensors = any(isinstance(value, Tensor) and value.dim() for value in values)
        # A constant with dimensions has the parameter's shape, or is broadcast over it.
        constant = any(given.op == "get_attr" and given.meta["val"].dim() for given in node.all_input_nodes)
        if node.op == "call_function" and tensors and (constant or not _is_pointwise(node.target)):
            found.append(node)
    if not found:
        return None
    # A view says less of what the update does than what computes on it.
    telling = [node for node in found if not getattr(node.target, "is_view", False)] or found
    return f"{telling[0].target} at {line_of(telling[0])} mixes elements"


# Copies and fills work element by element, but carry no pointwise tag.
_ELEMENTWISE = {
    aten.copy_.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
}


def _is_pointwise(target: Any) -> bool:
    return target in _ELEMENTWISE or (isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags)


def check_separate(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype, device: Any
) -> None:
    """Prove that no parameter's update reads another parameter: two of one shape, updated together, by data flow.

    Raises:
        CaptureError: it does (a norm over all gradients, for example).
    """
    sample = Sample(optimizer, group, shape or torch.Size((1,)), dtype, device)
    both, _ = sample.trace(None, parameters=2)
    # By the node that made the memory: in-place operators and views share it.
    reads: dict[fx.Node, set[str]] = {}
    for node in both.graph.nodes:
        if node.op == "placeholder":
            name = meta(node)["update_input"]
            reads[node] = set() if name == "lr" else {"second" if name.endswith(" 1") else "first"}
        elif node.op != "output":
            memory = _memory(node)
            found = reads.setdefault(memory, set())
            found |= {one for given in node.all_input_nodes for one in reads[_memory(given)]}
            if len(found) > 1:
                raise CaptureError(
                    f"{type(optimizer).__name__} updates a parameter from other parameters' values or gradients: "
                    f"{node.target} at {line_of(node)}\n"
                    "The graph updates each parameter for itself. What needs all gradients (clipping, a global norm) "
                    "belongs into build(), behind backward()."
                )


def _memory(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor which ``node`` is, or is a view of."""
    root = root_of(node)
    while (source := viewed(root)) is not None:
        root = root_of(source)
    return root


def refuse_random(graph: fx.GraphModule, optimizer: str) -> None:
    """Raise a CaptureError if the update draws random numbers."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"{optimizer}.step() draws random numbers ({node.target} at {line_of(node)})\n"
                "They would differ between ranks, where the numbers of one device need them equal. Use another one."
            )


def line_of(node: fx.Node) -> str:
    """Return the line of the optimizer's source that the node comes from."""
    return str(node.meta.get("custom", {}).get("line") or "a line unknown")
