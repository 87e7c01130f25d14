"""Checks of plain inputs in a job of several ranks: refuse those that are not a part of the batch.

A plain tensor is this rank's part of the batch along dimension 0. A tensor that every rank holds whole has the same
type and fits the same operators, but its global shape is a multiple of what the user means: eight classes instead of
four. So ranks compare their plain inputs once, when a step is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerograph.base.source import raising_line
from zerograph.compiler.batch import Batch
from zerograph.errors import InputError, ZeroGraphError
from zerograph.ir.sbp import NdSbp, Split, broadcast, show
from zerograph.runtime.job.process_group import Job, explaining_failures
from zerograph.runtime.job.reports import name_ranks


class Values(NamedTuple):
    """A summary of the values of one plain input on one rank, which ranks exchange.

    Attributes:
        digest: digest of the bytes; equal for tensors that are bitwise equal.
        constant: all rows are equal; for a tensor of one row, all elements.
        lowest, highest: the smallest and largest element of a tensor of integers; 0 for other dtypes and without
            elements.
    """

    digest: int
    constant: int
    lowest: int
    highest: int


@dataclass(frozen=True)
class Comparison:
    """The plain inputs of all ranks; empty by default, for a job of one rank.

    Attributes:
        values: for each rank, in order, the summary of each input; that of a DTensor is empty.
        grid: the ranks as the placement arranges them, a nested list.
    """

    values: Sequence[Sequence[Values]] = ()
    grid: Any = ()

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 if no inputs were compared."""
        return len(self.values)

    def digests(self, number: int) -> set[int]:
        """Return the distinct digests of input ``number`` over the ranks."""
        return {row[number].digest for row in self.values}


NO_COMPARISON = Comparison()

_NO_VALUES = Values(0, False, 0, 0)

# The warning is for tensors that may be a table of weights, not for a batch of images; in bytes.
_MAX_WARNED_BYTES = 1 << 20
# Fewer integers than this may be equal on all ranks by chance, for instance a few class labels.
_MIN_INTEGERS = 32


def compare_inputs(job: Job, batch: Batch, doing: str) -> Comparison:
    """Exchange a summary of the plain inputs. A collective: every rank calls it, with inputs of the same shapes.

    Args:
        doing: names the step in messages.
    """
    if job.size == 1 or not batch.tensors:
        return NO_COMPARISON
    passed = batch.passed or batch.tensors
    own = [_values(tensor) if plain else _NO_VALUES for tensor, plain in zip(passed, batch.plain, strict=True)]
    sent = torch.tensor(own, dtype=torch.int64, device="cpu")  # [inputs, 4]
    with explaining_failures(job, f"comparing the inputs of {doing}"):
        rows = job.channel.gather(sent).tolist()
    return Comparison([[Values(*numbers) for numbers in row] for row in rows], job.grid)


def _values(tensor: Tensor) -> Values:
    if tensor.is_meta or not tensor.numel():
        return _NO_VALUES
    tensor = tensor.detach().cpu().contiguous()
    digest = _digest(tensor)
    rows = tensor if tensor.dim() and len(tensor) > 1 else tensor.view(-1)
    constant = len(rows) > 1 and bool((rows == rows[:1]).all())
    limits = (int(tensor.min()), int(tensor.max())) if tensor.dtype in _INTEGERS else (0, 0)
    return Values(digest, constant, *limits)


def _digest(tensor: Tensor) -> int:
    content = tensor.view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(content.data, digest_size=8).digest(), signed=True)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_inputs(batch: Batch, read: Collection[int], comparison: Comparison, warn: Callable[[str], None]) -> None:
    """Refuse inputs that cannot be a part of the batch, and warn of inputs that may not be one.

    Args:
        read: numbers of the inputs that the step computes with outside of local regions.
        comparison: the plain inputs of all ranks.
        warn: shows a message to the user.

    Raises:
        InputError: ranks that must hold the same values hold different ones, or an input has another number of rows
            than the batch and is bitwise equal on all ranks. Raised on every rank.
    """
    if comparison.ranks < 2:
        return
    for number in read:
        if batch.plain[number]:
            _check_replicated(number, batch, comparison)
    parts = [number for number in range(len(batch.tensors)) if is_part(batch, number) and batch.tensors[number].numel()]
    equal = [number for number in parts if len(comparison.digests(number)) == 1]
    sizes = {len(batch.tensors[number]) for number in parts if number not in equal}
    for number in equal if sizes else ():
        if number in read:
            _check_equal(number, batch, sizes, comparison, warn)
    if not sizes:
        _warn_of_equal_batches([number for number in equal if number in read], batch, comparison, warn)


def is_part(batch: Batch, number: int) -> bool:
    """Return True if input ``number`` is a plain tensor that counts as this rank's part of the batch."""
    return batch.plain[number] and batch.tensors[number].dim() > 0 and Split(0) in batch.sbp[number]


def _check_equal(
    number: int, batch: Batch, sizes: Collection[int], comparison: Comparison, warn: Callable[[str], None]
) -> None:
    """Refuse an input that is equal on all ranks, or warn of it.

    Args:
        number: number of the input.
        sizes: numbers of rows of the inputs that differ between the ranks.
    """
    name, tensor, constant = batch.names[number], batch.tensors[number], comparison.values[0][number].constant
    rows = len(tensor)
    few = _is_few(tensor)
    multiple = any(size and (rows % size == 0 or size % rows == 0) for size in sizes)
    about = f"{name} of shape {tuple(tensor.shape)} is bitwise equal on all {comparison.ranks} ranks"
    choices = choices_for(name, comparison.grid)
    computes = f"the step concatenates the parts of all ranks, to a tensor of shape {batch.specs[number].shape}"
    # A target for every position of a sample may be constant, or equal by chance.
    if rows not in sizes and not (multiple and (few or (constant and rows > 1))):
        raise InputError(
            f"{about}, and its dimension 0 is {rows} where the batch has {' or '.join(map(str, sorted(sizes)))}\n"
            f"A plain input is this rank's part of the batch: {computes}.\n{choices}"
        )
    if not constant and not few and tensor.nbytes <= _MAX_WARNED_BYTES:
        warn(f"{about}, and counts as this rank's part of the batch: {computes}\n{choices}")


def _warn_of_equal_batches(
    parts: Sequence[int], batch: Batch, comparison: Comparison, warn: Callable[[str], None]
) -> None:
    """Warn of ranks that all passed the same rows, as without a sampler, by the first input that is no constant."""
    for number in parts:
        is_constant = comparison.values[0][number].constant or _is_few(batch.tensors[number])
        if not is_constant and len(replica_groups(comparison.grid, batch.sbp[number])) > 1:
            warn(
                f"{batch.names[number]} is bitwise equal on all {comparison.ranks} ranks, and so are all inputs: each "
                f"row counts {comparison.ranks} times, and more ranks compute no more\n"
                "Let each rank load its own rows: by zg.prepare(loader), by torch's DistributedSampler, or as "
                f"x.chunk(zg.world_size())[zg.rank()]. If every rank holds the whole batch on purpose, pass "
                f"zg.replicated({batch.names[number]})."
            )
            return


def _is_few(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() < _MIN_INTEGERS


def choices_for(name: str, grid: object) -> str:
    """Return the advice for an input that is not a part of the batch."""
    call = f"zg.to_global({name}, placement=zg.placement('cpu', ranks={grid}), sbp=zg.sbp"
    return (
        f"If every rank holds all of it, pass zg.replicated({name}), or {call}.broadcast). If each rank holds a part "
        f"of a larger tensor, pass {call}.split(0)). If each rank computes with its own values only, do so in a "
        "zg.local region."
    )


def _check_replicated(number: int, batch: Batch, comparison: Comparison) -> None:
    """Refuse a plain input whose values differ between ranks that hold the same part of the batch."""
    sbp = tuple(broadcast if batch.passed and entry != Split(0) else entry for entry in batch.sbp[number])
    for ranks in replica_groups(comparison.grid, sbp):
        if len({comparison.values[rank][number].digest for rank in ranks}) == 1:
            continue
        name, tensor = batch.names[number], (batch.passed or batch.tensors)[number]
        head = f"{name} of shape {tuple(tensor.shape)} is {show(sbp)}, but differs between {name_ranks(ranks)}"
        if tensor.dim():
            raise InputError(f"{head}\nPass the same tensor on these ranks, or let the graph split it.")
        raise InputError(
            f"{head}: a 0-d tensor is whole on every rank\nPass the same number on all ranks. For one number per rank "
            f"pass a tensor of one row, {name}.reshape(1): build() then gets one row per rank, and may sum them."
        )


def replica_groups(grid: Any, sbp: NdSbp) -> list[list[int]]:
    """Return the groups of ranks that hold the same piece of a tensor placed ``sbp``, in the order of the pieces."""
    ranks = torch.tensor(grid, device="cpu")
    split = [dim for dim, entry in enumerate(sbp) if isinstance(entry, Split)]
    others = [dim for dim in range(ranks.dim()) if dim not in split]
    pieces = math.prod(ranks.shape[dim] for dim in split)
    groups: list[list[int]] = ranks.permute(*split, *others).reshape(pieces, -1).tolist()
    return groups


def digests_of_whole(batch: Batch) -> list[int]:
    """Return a number from 0 up for the values of each input, if ranks take pieces of whole sequences; else nothing.

    Ranks of a row compare them before each step. It is 0 for global tensors, and on accelerators, where reading a
    tensor would wait for its computation: these are compared when a step is compiled.
    """
    return [
        _digest(tensor.detach().contiguous()) % 2**62
        if is_plain and tensor.device.type == "cpu" and tensor.numel()
        else 0
        for tensor, is_plain in zip(batch.passed, batch.plain, strict=False)
    ]


def check_whole(batch: Batch, digests: Sequence[Sequence[int]], grid: Any) -> None:
    """Refuse whole sequences that differ between ranks which take pieces of them.

    Args:
        digests: for each rank, in order, those of :func:`digests_of_whole`.
        grid: the ranks as the placement arranges them, a nested list.

    Raises:
        InputError: that is so. Raised on every rank.
    """
    comparison = Comparison([[Values(digest, False, 0, 0) for digest in row] for row in digests], grid)
    for number in range(len(batch.passed)):
        if batch.plain[number]:
            _check_replicated(number, batch, comparison)


@contextlib.contextmanager
def explain_failure(batch: Batch, comparison: Comparison) -> Iterator[None]:
    """Explain an error that tracing ``build()`` raises inside, if inputs have unequal numbers of rows or are empty.

    Raises:
        InputError: that is so, and the error inside is not a :class:`ZeroGraphError`.
    """
    try:
        yield
    except ZeroGraphError:
        raise
    except Exception as error:
        parts = [number for number in range(len(batch.tensors)) if is_part(batch, number)]
        specs = zip(batch.names, batch.specs, strict=True)
        if named := [f"  {name}: {spec.shape}" for name, spec in specs if 0 in spec.shape]:
            problem = "These inputs have no elements:"
            advice = "Leave such a batch out on all ranks, or pad it to one element."
        elif len({len(batch.tensors[number]) for number in parts}) > 1:
            try:
                check_inputs(batch, parts, comparison, lambda message: None)
            except InputError as input_error:
                raise input_error from error
            named = [f"  {batch.names[number]}: {tuple(batch.tensors[number].shape)}" for number in parts]
            problem = "The inputs have unequal numbers of rows in dimension 0, along which the batch is split:"
            advice = (
                "Pass equally many samples in all inputs of the batch. Pass a tensor that is not part of the batch as "
                "zg.replicated(x), if every rank holds all of it."
            )
        else:
            raise
        place = "   ".join(raising_line(error.__traceback__))
        lines = [f"build() failed: {type(error).__name__}: {error}", f"  {place}", problem, *named, advice]
        raise InputError("\n".join(lines)) from error
