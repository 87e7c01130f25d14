"""FlexAttention of torch, whose private parts a capture replaces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode


@contextlib.contextmanager
def replaced_flex_attention(attend: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Iterator[None]:
    """Make ``flex_attention`` call ``attend`` in place of its higher-order operator, which it would compile.

    User code holds the public function by name, so the names that it looks up itself are replaced. The tensors of a
    block mask from ``create_block_mask`` note its function, so that :func:`mask_of_blocks` recognises them.
    """
    from torch.nn.attention import flex_attention as module

    create = module._create_sparse_block_from_block_mask

    def created(blocks: Any, mask_mod: Any, *args: Any, **kwargs: Any) -> Any:
        block_mask = create(blocks, mask_mod, *args, **kwargs)
        block_mask.kv_num_blocks._zerograph_mask_mod = mask_mod  # type: ignore[attr-defined]
        return block_mask

    with (
        patch.object(module, "flex_attention_hop", attend),
        # It refuses gradients on the CPU.
        patch.object(module, "_validate_device", lambda query, key, value: None),
        # Else the function compiles the operator by itself. It warns of that, too.
        patch.object(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        patch.object(module, "_create_sparse_block_from_block_mask", created),
        patch.object(module, "_ordered_to_dense", dense_blocks),
    ):
        yield


def uses_flex_attention() -> bool:
    """Return whether the program has imported FlexAttention."""
    return "torch.nn.attention.flex_attention" in sys.modules


def dense_blocks(counts: Tensor, columns: Tensor, size: int) -> Tensor:
    """Return a table [..., rows, size] of 1 for every block that is listed, without writing to it.

    Args:
        counts: number of listed blocks in each row [..., rows].
        columns: the blocks of each row, the listed ones first [..., rows, any].
        size: number of columns.
    """
    listed = torch.arange(columns.shape[-1], device=columns.device) < counts.unsqueeze(-1)
    numbers = torch.arange(size, device=columns.device, dtype=columns.dtype)
    hit = (columns.unsqueeze(-1) == numbers) & listed.unsqueeze(-1)
    return hit.any(-2).to(torch.int32)


def mask_of_blocks(block_mask: Sequence[Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return the mask function of a block mask, and its blocks where these say more than the function.

    Args:
        block_mask: as ``BlockMask.as_tuple()`` returns it.

    Returns:
        The function, or None for one that masks nothing; and the listed blocks, or None: ``counts`` and ``columns`` of
        the blocks to which the function applies, ``full_counts`` and ``full_columns`` of those that it does not mask
        (None without any), and ``size``, positions of a block along queries and along keys.
    """
    from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE, noop_mask

    counts, columns, full_counts, full_columns = block_mask[2:6]
    *_, query_size, key_size, function = block_mask
    mask_mod = None if function is noop_mask else function
    if min(query_size, key_size) == _LARGE_SPARSE_BLOCK_SIZE or (
        getattr(counts, "_zerograph_mask_mod", None) is function
    ):
        return mask_mod, None
    blocks = {"counts": counts, "columns": columns, "full_counts": full_counts, "full_columns": full_columns}
    return mask_mod, {**blocks, "size": (query_size, key_size)}


def is_identity(score_mod: Any) -> bool:
    """Return whether a score function is the one that ``flex_attention`` takes for none."""
    from torch.nn.attention.flex_attention import _identity

    return score_mod is _identity


def indexed_by_tensors() -> contextlib.AbstractContextManager[Any]:
    """Make ``table[i]`` with a 0-d tensor ``i`` one lookup instead of reading ``i``."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    context: contextlib.AbstractContextManager[Any] = TransformGetItemToIndex()
    return context


def sizes_untraced() -> contextlib.AbstractContextManager[Any]:
    """Compute with symbolic sizes without nodes: a trace inside another one does not know the symbols of the outer."""
    return patch.object(
        ProxyTorchDispatchMode, "__sym_dispatch__", lambda self, func, types, args, kwargs: func(*args, **kwargs)
    )


def compiled_functions_run_plainly() -> contextlib.AbstractContextManager[Any]:
    """Make functions from ``torch.compile`` run as they are written, inside a trace."""
    # Loaded only by programs that have such functions, or that use FlexAttention, which makes them itself.
    if "torch._dynamo.eval_frame" not in sys.modules and not uses_flex_attention():
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context
