"""Prove properties of an update from its graph: elementwise, separate for each parameter, nothing random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir.alias import viewed
from zerograph.ir.metadata import meta
from zerograph.ir.update_program import Path
from zerograph.optim import hyperparameters
from zerograph.optim.memory import FACTORIES, root_of
from zerograph.optim.sampling import Sample

aten = torch.ops.aten


def mixing(graph: fx.GraphModule) -> str | None:
    """Describe the first operator that makes the update not elementwise, with its line."""
    mixing_nodes: list[fx.Node] = []
    for node in graph.graph.nodes:
        values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
        tensors = any(isinstance(value, Tensor) and value.dim() for value in values)
        # A constant with dimensions has the parameter's shape, or is broadcast over it.
        constant = any(argument.op == "get_attr" and argument.meta["val"].dim() for argument in node.all_input_nodes)
        if node.op == "call_function" and tensors and (constant or not _is_pointwise(node.target)):
            mixing_nodes.append(node)
    if not mixing_nodes:
        return None
    # A view says less about the update than an operator that computes.
    telling = [node for node in mixing_nodes if not getattr(node.target, "is_view", False)] or mixing_nodes
    return f"{telling[0].target} at {line_of(telling[0])} mixes elements"


# Copies and fills are elementwise, but have no pointwise tag.
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
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    device: Any,
    counts: Sequence[Path] = (),
) -> None:
    """Prove by data flow that the update of a parameter reads no other parameter: trace two of one shape together.

    Args:
        counts: numbers that count steps, which are inputs.

    Raises:
        CaptureError: it reads another parameter (for a norm over all gradients, for example).
    """
    sample = Sample(optimizer, group, shape or torch.Size((1,)), dtype, device, counts=counts)
    both, _ = sample.trace(None, parameters=2)
    # The key is the node that allocated the memory: in-place operators and views share it.
    reads: dict[fx.Node, set[str]] = {}
    shared = {"lr", *map(hyperparameters.name, counts)}
    for node in both.graph.nodes:
        if node.op == "placeholder":
            name = meta(node)["update_input"]
            reads[node] = set() if name in shared else {"second" if name.endswith(" 1") else "first"}
        elif node.op != "output":
            memory = _memory(node)
            sources = reads.setdefault(memory, set())
            # A factory takes a shape from a tensor, and no value.
            read = [] if node.target in FACTORIES else node.all_input_nodes
            sources |= {source for argument in read for source in reads[_memory(argument)]}
            if len(sources) > 1:
                raise CaptureError(
                    f"{type(optimizer).__name__} updates a parameter from other parameters' values or gradients: "
                    f"{node.target} at {line_of(node)}\n"
                    "The graph updates each parameter separately. Call code that needs all gradients (clipping, a "
                    "global norm) after backward(), in build() or in the loop."
                )


def _memory(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of ``node``, looking through views."""
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
                "They would differ between ranks, but must be equal on all. Use another optimizer."
            )


def line_of(node: fx.Node) -> str:
    """Return the line of the optimizer's source that the node comes from."""
    return str(node.meta.get("custom", {}).get("line") or "a line unknown")
