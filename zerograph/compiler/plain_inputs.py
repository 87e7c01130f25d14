"""Plain inputs of several ranks: refuse those that are no part of one batch.

A plain tensor is this rank's part of the batch along dimension 0. A tensor that every rank holds whole has the same
type and fits the same operators, but its global shape is then a multiple of what the user means: eight classes instead
of four. Ranks therefore compare their plain inputs once, when a step is compiled for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.base.source import raising_line
from zerograph.compiler.batch import Batch
from zerograph.errors import InputError, ZeroGraphError
from zerograph.ir.sbp import NdSbp, Split, show
from zerograph.runtime.job.process_group import Job, explained
from zerograph.runtime.job.signs import ranks_named


@dataclass(frozen=True)
class Values:
    """What a rank tells the others of the values of one plain input.

    Attributes:
        digest: of the bytes; equal for tensors that are bitwise equal.
        constant: all rows are equal, of a tensor with one row all elements.
        lowest, highest: of a tensor of integers; 0 for any other, and for an empty one.
    """

    digest: int
    constant: bool
    lowest: int
    highest: int


@dataclass(frozen=True)
class Comparison:
    """What the ranks of a job know of each other's plain inputs; by default there are no other ranks.

    Attributes:
        values: for each rank, in order, those of each input; those of a DTensor are not looked at.
        grid: the ranks as the placement arranges them, a nested list.
    """

    values: Sequence[Sequence[Values]] = ()
    grid: Any = ()

    @property
    def ranks(self) -> int:
        return len(self.values)

    def digests(self, at: int) -> set[int]:
        """Return the different digests of an input."""
        return {row[at].digest for row in self.values}


# Of a graph that no other rank runs.
NO_OTHERS = Comparison()

_NOTHING = Values(0, False, 0, 0)

# A warning is for tensors that may well be a table of weights, not for a batch of images.
_SMALL = 1 << 20
# Integers are equal by chance: a few class labels often are.
_FEW = 32


def compare_inputs(job: Job, batch: Batch, doing: str) -> Comparison:
    """Return the values of every rank's plain inputs. Every rank calls it, with inputs of the same shapes."""
    if job.size == 1 or not batch.tensors:
        return Comparison()
    mine = [_values(tensor) if plain else _NOTHING for tensor, plain in zip(batch.tensors, batch.plain, strict=True)]
    numbers = [[one.digest, int(one.constant), one.lowest, one.highest] for one in mine]
    sent = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1)
    received = torch.empty(job.size * len(sent), dtype=torch.int64, device="cpu")
    with explained(job, f"comparing the inputs of {doing}"):
        _torch.all_gather(received, sent, job.control)
    rows: list[list[list[int]]] = received.view(job.size, len(mine), 4).tolist()
    values = [[Values(digest, bool(constant), low, high) for digest, constant, low, high in row] for row in rows]
    return Comparison(values, job.grid)


def _values(tensor: Tensor) -> Values:
    if tensor.is_meta or not tensor.numel():
        return _NOTHING
    tensor = tensor.detach().cpu().contiguous()
    content = tensor.view(-1).view(torch.uint8).numpy()
    digest = int.from_bytes(hashlib.blake2b(content.data, digest_size=8).digest(), signed=True)
    rows = tensor if tensor.dim() and len(tensor) > 1 else tensor.view(-1)
    constant = len(rows) > 1 and bool((rows == rows[:1]).all())
    if tensor.dtype in _INTEGERS:
        return Values(digest, constant, int(tensor.min()), int(tensor.max()))
    return Values(digest, constant, 0, 0)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_inputs(batch: Batch, read: Collection[int], compared: Comparison, warn: Callable[[str], None]) -> None:
    """Refuse what cannot be a part of one batch, and warn of what may be none.

    Args:
        read: numbers of the inputs that the step computes with outside of local regions.

    Raises:
        InputError: ranks that hold the same part hold other values, or an input has another number of rows than the
            batch and is bitwise equal on all ranks. The same on every rank.
    """
    if compared.ranks < 2:
        return
    for at in read:
        if batch.plain[at]:
            _check_equal_where_whole(at, batch, compared)
    parts = [at for at in range(len(batch.tensors)) if is_part(batch, at) and batch.tensors[at].numel()]
    equal = [at for at in parts if len(compared.digests(at)) == 1]
    sizes = {len(batch.tensors[at]) for at in parts if at not in equal}
    for at in equal if sizes else ():
        if at in read:
            _check_equal(at, batch, sizes, compared, warn)


def is_part(batch: Batch, at: int) -> bool:
    """Return whether an input is a plain tensor that is taken for this rank's part of the batch."""
    return batch.plain[at] and batch.tensors[at].dim() > 0 and Split(0) in batch.sbp[at]


def _check_equal(
    at: int, batch: Batch, sizes: Collection[int], compared: Comparison, warn: Callable[[str], None]
) -> None:
    """Refuse an input that is equal on all ranks, or warn of it.

    Args:
        sizes: numbers of rows of the inputs that differ between the ranks.
    """
    tensor, rows, constant = batch.tensors[at], len(batch.tensors[at]), compared.values[0][at].constant
    few = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() < _FEW
    multiple = any(size and (rows % size == 0 or size % rows == 0) for size in sizes)
    about = f"{batch.names[at]} of shape {tuple(tensor.shape)} is bitwise equal on all {compared.ranks} ranks"
    choices = choices_for(batch.names[at], compared.grid)
    computes = f"the step computes with all ranks' together, a tensor of shape {batch.specs[at].shape}"
    # A target for every position of a sample may be a constant, or by chance the same.
    if rows not in sizes and not (multiple and (few or (constant and rows > 1))):
        raise InputError(
            f"{about}, and its dimension 0 is {rows} where the batch has {' or '.join(map(str, sorted(sizes)))}\n"
            f"A plain input is this rank's part of the batch: {computes}.\n{choices}"
        )
    if not constant and not few and tensor.nbytes <= _SMALL:
        warn(f"{about}, and is taken for this rank's part of the batch: {computes}\n{choices}")


def choices_for(name: str, grid: object) -> str:
    """Return the advice on an input that is no part of the batch."""
    placed = f"zg.to_global({name}, placement=zg.placement('cpu', ranks={grid}), sbp=zg.sbp"
    return (
        f"If every rank holds all of it, give zg.replicated({name}), or {placed}.broadcast). If each rank holds a part "
        f"of a larger tensor, give {placed}.split(0)). What each rank is to compute with its own goes into a zg.local "
        "region."
    )


def _check_equal_where_whole(at: int, batch: Batch, compared: Comparison) -> None:
    """Refuse a plain input that ranks with the same part of the batch hold different values of."""
    for ranks in _sharing(compared.grid, batch.sbp[at]):
        if len({compared.values[rank][at].digest for rank in ranks}) == 1:
            continue
        name, tensor = batch.names[at], batch.tensors[at]
        head = (
            f"{name} of shape {tuple(tensor.shape)} is {show(batch.sbp[at])}, but differs between {ranks_named(ranks)}"
        )
        if tensor.dim():
            raise InputError(f"{head}\nGive these ranks the same tensor, or let the graph split it.")
        raise InputError(
            f"{head}: a 0-d tensor is whole on every rank\nGive all ranks the same number. Numbers of single "
            f"ranks go in as a tensor of one row, {name}.reshape(1): build() then sees one for each rank, and may sum "
            "them."
        )


def _sharing(grid: Any, sbp: NdSbp) -> Iterator[list[int]]:
    """Yield the groups of ranks that hold the same piece of a tensor that is placed so."""
    ranks = torch.tensor(grid)
    split = [isinstance(one, Split) for one in sbp]
    pieces: dict[tuple[int, ...], list[int]] = {}
    for place in itertools.product(*map(range, ranks.shape)):
        key = tuple(index for index, cut in zip(place, split, strict=True) if cut)
        pieces.setdefault(key, []).append(int(ranks[place]))
    yield from pieces.values()


@contextlib.contextmanager
def unequal_explained(batch: Batch, compared: Comparison) -> Iterator[None]:
    """Say what is wrong with the inputs where tracing ``build()`` fails inside and they have unequal numbers of rows.

    Raises:
        InputError: they have, and the error inside is not one of zerograph's.
    """
    try:
        yield
    except ZeroGraphError:
        raise
    except Exception as error:
        _explain_unequal(error, batch, compared)
        raise


def _explain_unequal(error: Exception, batch: Batch, compared: Comparison) -> None:
    parts = [at for at in range(len(batch.tensors)) if is_part(batch, at)]
    if len({len(batch.tensors[at]) for at in parts}) < 2:
        return
    try:
        check_inputs(batch, parts, compared, lambda message: None)
    except InputError as found:
        raise found from error
    line, code = raising_line(error.__traceback__)
    shapes = "\n".join(f"  {batch.names[at]}: {tuple(batch.tensors[at].shape)}" for at in parts)
    raise InputError(
        f"build() failed: {type(error).__name__}: {error}\n  {line}   {code}\n"
        f"The inputs do not have equally many rows in dimension 0, along which the batch is split:\n{shapes}\n"
        "Give all inputs of a batch equally many samples. What is no part of the batch goes in as zg.replicated(x), if "
        "every rank holds all of it."
    ) from error
