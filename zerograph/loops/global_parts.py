"""Parts of a batch that ranks hold, as global tensors."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import data
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.ir.annotate import is_replicated
from zerograph.ir.sbp import split
from zerograph.loops.containers import INSIDE, found_in, map_tensors, mapped
from zerograph.loops.rows import Texts, WholeBatch
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.tensor_hash import hash_bits


def of_parts(values: Any, doing: str) -> Any:
    """Return the same values with global tensors in place of plain ones, of which each rank passes its rows.

    Tensors without dimensions, and those of :func:`zerograph.replicated`, are whole on every rank. If a rank has no
    row, all ranks get the rows of all.

    Args:
        values: tensors in containers of any kind, or a :class:`.rows.WholeBatch`.
        doing: what the ranks are about to do, for messages.

    Raises:
        RankMismatchError: ranks pass other numbers of tensors, or tensors of other shapes or dtypes.
    """
    if isinstance(values, WholeBatch):
        world().warn(
            f"every rank computes with all rows of {doing}: {values.reason}, of which zerograph does not know the parts"
        )
        check_equal(values.batch, doing)
        return values.batch
    now, tensors = world(), _plain_in(values)
    if not tensors or now.job.size == 1:
        return values
    parts = {id(tensor): tensor for tensor in tensors if tensor.dim() and not is_replicated(tensor)}
    whole = [tensor for tensor in tensors if id(tensor) not in parts]
    facts = [f"{[*tensor.shape[1:]]} {tensor.dtype}" for tensor in parts.values()]
    facts += [_facts(tensor) for tensor in whole]
    own = [len(tensor) for tensor in parts.values()]

    def words() -> dict[str, str]:
        advice = "(a rank without rows of one passes an empty tensor: torch.empty(0, ...))"
        return {"the number of its tensors": f"{len(facts)} {advice}", "its tensors": "; ".join(facts)}

    sizes = agree(now.job, doing, digest(facts), words, None, own)
    rows = dict(zip(parts, zip(*sizes, strict=True), strict=True))
    # Gradients flow to the parts.
    made = {key: GlobalTensor.of_part(tensor, (split(0),), rows[key]) for key, tensor in parts.items()}
    return map_tensors(values, lambda tensor: made.get(id(tensor), tensor))


def with_all_texts(values: Any) -> Any:
    """Return a batch with the strings of the rows of all ranks. A collective if a rank has read strings."""
    texts = found_in(values, Texts)
    if not texts:
        return values
    # A line for each rank: no representation of a string has an end of a line.
    line = bytearray(repr([one.values for one in texts]).encode() + b"\n")
    lines = bytes(data.gather(torch.frombuffer(line, dtype=torch.uint8)).tolist()).decode().split("\n")[:-1]
    ranks = [ast.literal_eval(one) for one in lines]
    whole = {id(text): sum(parts, type(text.values)()) for text, *parts in zip(texts, *ranks, strict=True)}
    return mapped(values, lambda one: whole[id(one)] if isinstance(one, Texts) else INSIDE)


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
    """Return the tensors that are neither global nor parameters."""
    return [one for one in found_in(values, Tensor) if not isinstance(one, (GlobalTensor, nn.Parameter))]


def _facts(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} {tensor.dtype} of hash {int(hash_bits(tensor.detach().to_dense())):x}"
