"""Strides of a trace: those that operators give when they run, or a view of a result fails, or reads other elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.harness import sliced
from tests.passes.test_rules import SAMPLES, real
from zerograph import _torch
from zerograph._torch import fake_mode, pytree
from zerograph.capture import decompositions

aten = torch.ops.aten

# They take no transposed tensors: code calls them on contiguous ones.
_CONTIGUOUS = {aten._unsafe_view.default, aten.native_group_norm.default, aten.native_group_norm_backward.default}
OPERATORS = [operator for operator in SAMPLES if not operator.is_view and operator not in _CONTIGUOUS]
CASES = [(operator, number) for operator in OPERATORS for number in range(len(SAMPLES[operator]))]


def turned(tensor: Tensor) -> Tensor:
    """The same values in memory in which the last two dimensions are exchanged."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def strides(value: Any) -> list[tuple[int, ...]]:
    """The strides of all tensors, of dimensions of more than one element."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tuple(s for s, n in zip(one.stride(), one.shape, strict=True) if n > 1) for one in tensors]


@sliced("operator, number", [case for case in CASES if not case[1] or case[0] is aten.index.Tensor], CASES)
def test_results_have_the_strides_of_the_trace(operator: Any, number: int) -> None:
    args, kwargs = pytree.tree_map(real, SAMPLES[operator][number])
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.numel()]
    for turning in (*([place] for place in places), places):
        changed = [turned(leaf) if i in turning else leaf for i, leaf in enumerate(leaves)]
        given = [leaf for leaf in changed if isinstance(leaf, Tensor)]

        def run(*tensors: Tensor, changed: list[Any] = changed) -> list[Any]:
            rest = iter(tensors)
            mixed = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in changed]
            args, kwargs = pytree.tree_unflatten(mixed, spec)
            return [leaf for leaf in pytree.tree_leaves(operator(*args, **kwargs)) if isinstance(leaf, Tensor)]

        with fake_mode() as mode, torch.no_grad():
            fakes = [mode.from_tensor(one, static_shapes=True) for one in given]
            traced = _torch.trace(run, fakes, decompositions.table())
        expected = [node.meta["val"] for node in traced.graph.output_node().args[0]]
        assert strides(traced(*given)) == strides(expected), operator
