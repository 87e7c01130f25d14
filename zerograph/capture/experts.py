"""Experts of transformers during capture: products by expert, which rules can split over tokens and over experts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zerograph.base.contexts import given
from zerograph.ops.dispatch import combine, dispatch, gather_ids
from zerograph.ops.experts import expert_mm

# Number of groups that ranks split the experts into, by ``id`` of the module; and whether the batch is cut.
_split: ContextVar[tuple[Mapping[int, int], bool]] = ContextVar("split_experts", default=(MappingProxyType({}), False))


def expert_count(module: nn.Module) -> int:
    """Return the number of experts whose weights a module stacks, as transformers does for all its models; or 0."""
    weights = [_stored(module, name) for name in ("up_proj", "gate_up_proj", "down_proj")]
    stacked = [weight for weight in weights if isinstance(weight, Tensor) and weight.dim() == 3]
    counts = {weight.shape[0] for weight in stacked}
    return counts.pop() if len(stacked) == 2 and len(counts) == 1 else 0


def _stored(module: nn.Module, name: str) -> Any:
    """Return an attribute; of a parametrized one the original, as computing the attribute may draw random numbers."""
    if parametrize.is_parametrized(module, name):
        return getattr(module.parametrizations[name], "original", None)  # type: ignore[index]
    return getattr(module, name, None)


def in_groups(groups: Mapping[int, int], *, is_cut: bool) -> AbstractContextManager[None]:
    """Trace experts in so many groups, by ``id`` of the module; the others in one.

    Args:
        groups: number of groups.
        is_cut: the batch is cut into micro-batches.
    """
    return given(_split, (groups, is_cut))


def _groups_of(module: nn.Module) -> int:
    return _split.get()[0].get(id(module), 1)


def captured_experts() -> Iterator[tuple[Any, str, Any]]:
    """Yield the method by which transformers chooses the function of experts: owner, name, one with products by expert.

    A loop over the experts that got tokens has shapes that depend on values, and a grouped product sorts the tokens of
    the whole batch. ``"batched_mm"`` stays as it is, unless ranks split the experts.
    """
    interface: Any = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)
    if interface is None:
        return
    find = interface.get_interface

    def chosen(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        forward: Callable[..., Any] = find(self, name, default)

        @functools.wraps(forward)
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            replaced = name in (None, "eager", "grouped_mm") or _groups_of(module) > 1
            function = _forward if replaced and expert_count(module) and hasattr(module, "has_gate") else forward
            return function(module, *args, **kwargs)

        return run

    yield interface, "get_interface", chosen


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts as ``batched_mm_experts_forward`` of transformers does.

    Args:
        self: the module.
        hidden_states: [tokens, width].
        top_k_index, top_k_weights: the experts of each token, and their shares [tokens, choices].
    """
    groups, total = _groups_of(self), expert_count(self)
    if groups > 1 and _split.get()[1]:
        # In the order of tokens that ``dispatch`` has in a micro-batch.
        top_k_index = gather_ids(top_k_index)
        top_k_weights = dispatch(top_k_weights, top_k_index, groups, total)
    x: Tensor = hidden_states if groups == 1 else dispatch(hidden_states, top_k_index, groups, total)
    hidden = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", x, top_k_index)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    result = _linear(self, "down_proj", hidden, top_k_index)  # [groups, tokens, choices, width]
    # Earlier versions of transformers, such as 5.17, have no such norm.
    normed = getattr(self, "has_post_expert_norm", False)
    if groups > 1 and not normed:
        weighted = (result * top_k_weights.unsqueeze(-1)).sum(2)
        summed: Tensor = combine(weighted, top_k_index, total)
        return summed.to(hidden_states.dtype)
    result = result.sum(0)
    if normed:
        result = self.post_expert_norm(result)
    return (result * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _linear(self: Any, name: str, x: Tensor, ids: Tensor) -> Tensor:
    """Return tokens through a linear layer of each of their experts: [groups, tokens, choices, out]."""
    weight, groups = getattr(self, name), _groups_of(self)
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    total = weight.shape[0]
    matrices = weight.to(dtype).unflatten(0, (groups, -1))
    if not self.is_transposed:
        matrices = matrices.transpose(2, 3)
    result: Tensor = expert_mm(x.to(dtype), matrices, ids, total, 0)
    if self.has_bias:
        # As a product with ones, which is zero where a token's expert is in another group.
        bias = getattr(self, f"{name}_bias").to(dtype).unflatten(0, (groups, -1)).unsqueeze(2)
        result = result + expert_mm(result.new_ones(ids.shape[0], 1), bias, ids, total, 0)
    return result
