"""Paths of transformers outside of traces: it asks whether it is traced, and computes more if it is.

Traced, it builds every attention mask as a tensor of the length squared. Outside of traces it passes ``is_causal=True``
where a mask would mask nothing else. To know that it reads values of masks and positions. A capture answers from the
nodes that made these tensors, and builds a mask where they do not tell.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.base.source import warn_user
from zerograph.ir.alias import is_view, is_view_or_copy

aten = torch.ops.aten


def untraced_masks() -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions by which transformers builds the masks that it builds outside of traces: owner, name, it."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    older: Any = sys.modules.get("transformers.modeling_attn_mask_utils")
    replaced: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (masks, "is_tracing", lambda plain: lambda tensor=None: tensor is not None),
        (masks, "find_packed_sequence_indices", _unless_consecutive),
        (masks, "_ignore_causal_mask_sdpa", lambda plain: _with_arguments(plain, _drop_full_mask)),
        (masks, "_ignore_bidirectional_mask_sdpa", lambda plain: _with_arguments(plain, _drop_full_mask)),
        (masks, "_preprocess_mask_arguments", lambda plain: _with_arguments(plain, _warn_of_cache)),
        (
            getattr(older, "AttentionMaskConverter", None),
            "_ignore_causal_mask_sdpa",
            lambda plain: staticmethod(_with_arguments(plain, _set_training)),
        ),
    ]
    # These modules read no value where they ask.
    questions = ("is_torchdynamo_compiling", "is_tracing")
    replaced += [(sys.modules.get(name), ask, lambda plain: lambda *_: False) for name in _PLAIN for ask in questions]
    for owner, name, replacement in replaced:
        if hasattr(owner, name):
            yield owner, name, replacement(getattr(owner, name))


_PLAIN = (
    "transformers.integrations.sdpa_attention",
    "transformers.utils.output_capturing",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("falcon_mamba", "jamba", "mamba", "zamba")),
)


def _unless_consecutive(plain: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Return the search for documents in packed rows, which finds none where positions follow one another."""

    @functools.wraps(plain)
    def find(position_ids: Tensor) -> Tensor | None:
        return None if _is_consecutive(_torch.node_of(position_ids)) else plain(position_ids)

    return find


def _with_arguments(plain: Callable[..., Any], change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """Return the function with a change of its arguments, by name."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments)
        return plain(*bound.args, **bound.kwargs)

    return call


def _drop_full_mask(arguments: dict[str, Any]) -> None:
    """Ask whether a mask is needed with None for a padding mask that is known to mask nothing."""
    mask, keys = arguments["padding_mask"], arguments["kv_length"]
    if mask is not None and arguments.get("q_length", keys) == keys and _is_full(_torch.node_of(mask)):
        arguments["padding_mask"] = None


def _set_training(arguments: dict[str, Any]) -> None:
    """Ask older models as in training, where a trace makes no difference without a padding mask."""
    arguments["is_training"] = True


def _is_consecutive(node: fx.Node | None) -> bool:
    """Return whether each number of a row is known to be one more than the number before it."""
    while node is not None and node.meta["val"].dtype in _WHOLE and not _is_written(node):
        if node.target in _RANGES:
            return node.target is not aten.arange.start_step or bool((*node.args, 1)[2] == 1)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _keeps_steps(node, source):
            return False
        node = source
    return False


def _keeps_steps(node: fx.Node, source: fx.Node) -> bool:
    """Return whether rows of a node are rows of its first argument, or parts of them, plus a number."""
    if node.target in (aten.view.default, aten.unsqueeze.default):
        return bool(source.meta["val"].dim() == 1)
    if node.target is aten.expand.default:
        return source.meta["val"].dim() > 1 and not _is_one(source.meta["val"].shape[-1])
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return not isinstance(node.args[1], fx.Node) or not isinstance(node.args[1].meta["val"], Tensor)
    return node.target in (aten._to_copy.default, aten.clone.default)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_WHOLE = (torch.int32, torch.int64)


def _is_full(node: fx.Node | None) -> bool:
    """Return whether all elements of a mask are known to be true."""
    while node is not None and not _is_written(node):
        if node.target is aten.ones.default or (node.target is aten.full.default and node.args[1] == 1):
            return True
        if not is_view_or_copy(node):
            return False
        node = node.all_input_nodes[0]
    return False


def _is_written(node: fx.Node) -> bool:
    """Return whether an operator writes to the value of a node, or to a view of it."""
    return any(
        node in _torch.written_arguments(user) or (is_view(user) and user.args[0] is node and _is_written(user))
        for user in node.users
    )


def _warn_of_cache(arguments: dict[str, Any]) -> None:
    """Warn where a cache hides documents in packed rows from transformers' preparation of masks."""
    positions = arguments.get("position_ids")
    if (
        isinstance(positions, Tensor)
        and arguments.get("attention_mask") is None
        and arguments.get("past_key_values") is not None
        # Without an argument a model makes them itself, of one dimension, and they never restart.
        and (positions if positions._base is None else positions._base).dim() > 1
    ):
        warn_user(
            "transformers ignores position_ids that restart within a row while the model has a cache of keys and "
            "values: documents packed into a row would attend to each other\n"
            "Call the model with use_cache=False, or set model.config.use_cache = False."
        )
