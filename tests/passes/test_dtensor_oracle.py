"""A second opinion on the rules: DTensor's own strategies, one mesh dimension at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta

from tests.passes.samples import Zeros
from tests.passes.test_rules import SAMPLES, graph_of
from zerograph._torch import pytree
from zerograph.ir.sbp import Sbp, Split, broadcast, partial_sum
from zerograph.passes import rules

STRATEGIES: dict[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
COMMON = [operator for operator in SAMPLES if operator in STRATEGIES]

Placed = tuple[Sbp, ...]


def theirs(operator: Any, args: Any, kwargs: Any) -> set[tuple[Placed, Placed]]:
    """DTensor's strategies as (inputs, outputs); what SBP has no word for (a partial maximum) is left out."""

    def meta(value: Any) -> Any:
        return TensorMeta(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value

    asked, named = pytree.tree_map(meta, (args, kwargs))
    inputs = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
    found = set()
    for strategy in STRATEGIES[operator](operator, tuple(asked), named):
        # Outputs come first; those that are not computed are None.
        placed = [_sbp(one) for one in strategy if one is not None]
        if None not in placed:
            found.add((tuple(placed[len(placed) - inputs :]), tuple(placed[: len(placed) - inputs])))
    return found  # type: ignore[return-value]


def _samples(operator: Any) -> list[Any]:
    """Leave out signatures with zeros that the graph made: DTensor cannot know of them."""
    return [one for one in SAMPLES[operator] if not any(isinstance(leaf, Zeros) for leaf in pytree.tree_leaves(one))]


def _sbp(placement: Any) -> Sbp | None:
    if isinstance(placement, Replicate):
        return broadcast
    if isinstance(placement, Partial):
        return partial_sum if placement.reduce_op == "sum" else None
    return Split(placement.dim)


def contradictions(operator: Any) -> list[str]:
    """Where both have a strategy for the same inputs, but not with the same outputs."""
    found, additional = [], 0
    for args, kwargs in _samples(operator):
        _, node, _ = graph_of(operator, args, kwargs)
        known: dict[Placed, set[Placed]] = {}
        for inputs, outputs in theirs(operator, args, kwargs):
            known.setdefault(inputs, set()).add(outputs)
        for signature in rules.signatures_of(node, 2) or ():
            others = known.get(signature.inputs)
            additional += others is None
            if others is not None and signature.outputs not in others:
                found.append(f"{signature}, but DTensor yields {others}")
    return [f"{one} ({additional} signatures are ours alone)" for one in found]


# Strategies that differ from ours, with the reason.
DIFFERENT: dict[Any, str] = {
    torch.ops.aten.convolution_backward.default: "places the input's gradient where output_mask leaves it out",
    # From torch 2.15 on.
    torch.ops.aten.zeros_like.default: "zeros are B as well as P",
}


@pytest.mark.parametrize("operator", COMMON, ids=str)
def test_dtensor_yields_the_same_outputs(operator: Any) -> None:
    found = contradictions(operator)
    assert bool(found) == (operator in DIFFERENT), found


@pytest.mark.skipif(len(STRATEGIES) < 10, reason="torch 2.11's DTensor has four strategies for a single dimension")
def test_there_is_something_to_compare() -> None:
    compared = sum(bool(theirs(operator, *_samples(operator)[0])) for operator in COMMON)
    assert compared > 80
