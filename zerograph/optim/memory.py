"""Find the node that allocated a tensor of an update's graph, through in-place operators and copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerograph import _torch

aten = torch.ops.aten

# The value that each factory fills a tensor with.
FACTORIES = {
    aten.zeros_like.default: lambda node: 0.0,
    aten.zeros.default: lambda node: 0.0,
    aten.new_zeros.default: lambda node: 0.0,
    aten.ones_like.default: lambda node: 1.0,
    aten.ones.default: lambda node: 1.0,
    aten.full_like.default: lambda node: node.args[1],
    aten.full.default: lambda node: node.args[1],
}


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that allocated the tensor; ``node`` may be the result of in-place operators on it."""
    while node.op == "call_function" and isinstance(node.target, _torch.OpOverload) and _in_place(node.target):
        out = node.kwargs.get("out")
        node = out if isinstance(out, fx.Node) else node.all_input_nodes[0]
    return node


def _in_place(target: Any) -> bool:
    if target in (aten.lift_fresh_copy.default, aten.detach.default):
        return True
    _, name, overload = str(target).split(".")
    return name.endswith("_") or overload == "out"
