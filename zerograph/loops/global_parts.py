"""Parts of a batch that ranks hold, as global tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import data
from zerograph.eager.dispatch import sampled
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import RankMismatchError
from zerograph.ir.annotate import is_replicated
from zerograph.ir.sbp import split
from zerograph.loops.containers import INSIDE, found_in, map_tensors, mapped
from zerograph.loops.rows import Share, Texts, WholeBatch
from zerograph.runtime.job.differences import DOING
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.tensor_hash import hash_bits

# Keyword arguments of a call on a rank, for the other ranks.
_ARGUMENTS = "its keyword arguments"


def of_call(args: Any, kwargs: dict[str, Any], doing: str) -> Any:
    """Return the arguments of a call with global tensors in place of plain ones, as :func:`of_parts` does.

    A rank that leaves a tensor out, or passes None, has no row of it: images of a batch, of which its part has none.

    Raises:
        RankMismatchError: ranks pass other numbers of tensors, or tensors of other shapes or dtypes.
    """
    if not world().is_alone:
        for one in _plain_in((args, kwargs)):
            if one.dim() and not is_replicated(one):
                world().look_at_rows(one)
    try:
        return of_parts((args, kwargs), doing, kwargs)
    except RankMismatchError as error:
        completed = _completed(kwargs, error.facts)
        if completed is None:
            raise
    return of_parts((args, completed), doing)


def _completed(kwargs: dict[str, Any], facts: Sequence[Mapping[str, str]]) -> dict[str, Any] | None:
    """Return keyword arguments with an empty tensor for each one that only other ranks pass; None if there is none.

    One row in all might be broadcast to a batch, and a tensor of one dimension might be weights of classes: a rank that
    leaves out such a tensor has forgotten it.

    Args:
        kwargs: the arguments of this rank.
        facts: what the ranks have compared, of each.
    """
    if any(one.get(DOING) != facts[0].get(DOING) or _ARGUMENTS not in one for one in facts):
        return None
    ranks = [ast.literal_eval(one[_ARGUMENTS]) for one in facts]
    device = next((one.device for one in _plain_in(kwargs)), None)
    # In one order on all ranks.
    result = {name: kwargs.get(name) for rank in ranks for name in rank}
    missing = [name for name in result if any(name not in rank for rank in ranks)]
    for name in missing:
        rows, descriptions = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
        shape, dtype, needs_gradient = descriptions[0]
        if sum(rows) < 2 or len(shape) < 2 or any(one != descriptions[0] for one in descriptions):
            return None
        if result[name] is None:
            result[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=needs_gradient)
    return {**result, **kwargs, **result} if missing else None


def _described(kwargs: Mapping[str, Any]) -> str:
    """Return the rows of each tensor, and its shape without rows, dtype and need of a gradient, to be parsed."""
    parts = {
        name: (len(one), ([0, *one.shape[1:]], str(one.dtype).removeprefix("torch."), one.requires_grad))
        for name, one in kwargs.items()
        if isinstance(one, Tensor) and not isinstance(one, GlobalTensor) and one.dim() and not is_replicated(one)
    }
    return repr(parts)


def of_parts(values: Any, doing: str, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the same values with global tensors in place of plain ones, of which each rank passes its rows.

    Tensors without dimensions, and those of :func:`zerograph.replicated`, are whole on every rank. If a rank has no
    row, all ranks get the rows of all.

    Args:
        values: tensors in containers of any kind, or a :class:`.rows.WholeBatch`.
        doing: what the ranks are about to do, for messages.
        kwargs: keyword arguments of a call, for the facts of the error.

    Raises:
        RankMismatchError: ranks pass other numbers of tensors, or tensors of other shapes or dtypes.
    """
    if isinstance(values, WholeBatch):
        world().warn(
            f"every rank computes with all rows of {doing}: {values.reason}, of which zerograph does not know the parts"
        )
        check_equal(values.batch, doing)
        return values.batch
    now = world()
    if now.is_alone or not (tensors := _plain_in(values)):
        return values
    parts = {id(tensor): tensor for tensor in tensors if tensor.dim() and not is_replicated(tensor)}
    whole = [tensor for tensor in tensors if id(tensor) not in parts]
    facts = [f"{[*tensor.shape[1:]]} {tensor.dtype}" for tensor in parts.values()]
    facts += [_facts(tensor) for tensor in whole]
    own = [len(tensor) for tensor in parts.values()]

    def words() -> dict[str, str]:
        advice = "(a rank without rows of one passes an empty tensor: torch.empty(0, ...))"
        named = {"the number of its tensors": f"{len(facts)} {advice}", "its tensors": "; ".join(facts)}
        return named if kwargs is None else {**named, _ARGUMENTS: _described(kwargs)}

    sizes = agree(now.job, doing, digest(facts), words, None, own)
    rows = dict(zip(parts, zip(*sizes, strict=True), strict=True))
    # Gradients flow to the parts.
    made = {key: GlobalTensor.of_part(tensor, (split(0),), rows[key]) for key, tensor in parts.items()}
    return map_tensors(values, lambda tensor: made.get(id(tensor), tensor))


def of_batch(rows: Any) -> Any:
    """Return the batch, as global tensors, of which a loader has read this rank's rows. A collective."""
    return of_parts(_with_all_texts(rows), "a batch of a prepared loader")


def _with_all_texts(values: Any) -> Any:
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


def split_rows(values: Any) -> Any:
    """Return the same values with global tensors in place of plain ones, which every rank has: each keeps its rows.

    They stay whole where they need a gradient, and where they have other numbers of rows than each other, or fewer than
    there are ranks.
    """
    now, tensors = world(), [one for one in found_in(values, Tensor) if one.dim()]
    counts = {len(one) for one in tensors}
    if now.is_alone or len(counts) != 1 or min(counts) < now.job.size:
        return values
    if any(one.requires_grad or isinstance(one, (GlobalTensor, nn.Parameter)) for one in tensors):
        return values
    (count,) = counts
    rows = [Share(rank, now.job.size, now.slices).rows(count) for rank in range(now.job.size)]
    sizes = [part.stop - part.start for part in rows]

    def own(tensor: Tensor) -> Tensor:
        return GlobalTensor.of_part(tensor[rows[now.job.rank]], (split(0),), sizes) if tensor.dim() else tensor

    return map_tensors(values, own)


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


def check_numbers(doing: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise unless ranks have computed these tensors with the same numbers and plain tensors. A collective.

    Raises:
        RankMismatchError: they have not.
    """
    now = world()
    if now.job.size == 1:
        return
    numbers = [one.number if isinstance(one, GlobalTensor) else sampled(one) for one in tensors if one is not None]
    number, advice = digest(numbers), "draw them from one seed on all ranks, or from torch's generator"
    name = "numbers or plain tensors beside global ones"
    agree(now.job, doing, number, lambda: {name: f"with the digest {number:x}: {advice}"})


def _plain_in(values: Any) -> list[Tensor]:
    """Return the tensors that are neither global nor parameters."""
    return [one for one in found_in(values, Tensor) if not isinstance(one, (GlobalTensor, nn.Parameter))]


def _facts(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} {tensor.dtype} of hash {int(hash_bits(tensor.detach().to_dense())):x}"
