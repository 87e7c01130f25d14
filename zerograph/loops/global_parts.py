"""Parts of a batch that ranks hold, as global tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.ir.annotate import is_replicated
from zerograph.ir.sbp import split
from zerograph.loops.containers import mapped
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.tensor_hash import hash_bits


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is neither global nor a parameter."""
    return not isinstance(tensor, (GlobalTensor, nn.Parameter))


def of_parts(values: Any, doing: str) -> Any:
    """Return the same values with global tensors in place of plain ones, of which each rank passes its rows.

    Tensors without dimensions, and those of :func:`zerograph.replicated`, are whole on every rank. If a rank has no
    row, all ranks get the rows of all.

    Args:
        values: tensors in containers of any kind.
        doing: what the ranks are about to do, for messages.

    Raises:
        RankMismatchError: ranks pass other numbers of tensors, or tensors of other shapes or dtypes.
    """
    now, tensors = world(), _plain_in(values)
    if not tensors or now.job.size == 1:
        return values
    parts = {id(tensor): tensor for tensor in tensors if tensor.dim() and not is_replicated(tensor)}
    whole = [tensor for tensor in tensors if id(tensor) not in parts]
    facts = [f"{[*tensor.shape[1:]]} {tensor.dtype}" for tensor in parts.values()]
    facts += [_facts(tensor) for tensor in whole]
    own = [len(tensor) for tensor in parts.values()]
    sizes = agree(now.job, doing, digest(facts), lambda: {"its tensors": "; ".join(facts)}, None, own)
    rows = dict(zip(parts, zip(*sizes, strict=True), strict=True))
    if any(0 in one for one in rows.values()):
        return _whole_of(values, parts, now.job.size)
    made = {key: _global(tensor, rows[key]) for key, tensor in parts.items()}
    return mapped(values, lambda tensor: made.get(id(tensor), tensor))


def check_equal(values: Any, doing: str) -> None:
    """Raise unless the plain tensors among values are equal on all ranks.

    Raises:
        RankMismatchError: they differ.
    """
    now = world()
    if now.job.size == 1:
        return
    facts = [_facts(tensor) for tensor in _plain_in(values)]
    advice = "(a plain tensor is equal on all ranks; each has a part of zg.global_tensor(part, zg.sbp.split(0)))"
    agree(now.job, doing, digest(facts), lambda: {"its plain tensors": f"{'; '.join(facts)} {advice}"})


def _plain_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if is_plain(tensor):
            found.append(tensor)
        return tensor

    mapped(values, note)
    return found


def _facts(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} {tensor.dtype} of hash {int(hash_bits(tensor.detach().to_dense())):x}"


def _global(part: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the global tensor of this rank's rows; gradients flow to the part."""
    shape = (sum(rows), *part.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    unequal = None if len(set(rows)) == 1 else tuple(rows)
    return GlobalTensor.of_part(part, world().spec(shape, stride, part.dtype, part.device, (split(0),), unequal))


def _whole_of(values: Any, parts: dict[int, Tensor], ranks: int) -> Any:
    """Return values with the rows of all ranks, for a batch of fewer rows than ranks."""
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, [tensor.detach().cpu() for tensor in parts.values()])
    whole = {
        key: torch.cat(pieces).to(parts[key].device)
        for key, pieces in zip(parts, zip(*everybody, strict=True), strict=True)
    }
    return mapped(values, lambda tensor: whole.get(id(tensor), tensor))
