"""Rows of batches: which of them a rank keeps of a batch that all ranks collate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import default_collate

from zerograph.eager.tensor import GlobalTensor
from zerograph.ir.mesh import own_slices
from zerograph.loops.containers import INSIDE, PLAIN, found_in, has_parts, mapped


@dataclass(frozen=True)
class Share:
    """The part of each batch that one of several ranks has.

    Attributes:
        part, parts: which part it is, and the number of parts.
        slices: ``config.virtual_ranks``: where it divides a batch, a part is whole slices.
    """

    part: int
    parts: int
    slices: int | None = None

    def rows(self, count: int) -> slice:
        """Return this part's rows of ``count``: contiguous, and as many slices or rows as any other's, or one more."""
        unit = 1 if self.slices is None or count % self.slices else count // self.slices
        first, end = own_slices(count // unit, self.parts, self.part) if unit else (0, 0)
        return slice(first * unit, end * unit)


@dataclass(frozen=True)
class WholeBatch:
    """A batch that every rank gets whole, since its rows are not known.

    Attributes:
        batch: the batch.
        reason: why its rows are not known.
    """

    batch: Any
    reason: str


class Texts:
    """Strings of a batch, one for each row that this rank has read. No dataclass, which Lightning takes apart."""

    def __init__(self, values: Sequence[str | bytes]) -> None:
        self.values = values


def with_texts(batch: Any) -> Any:
    """Return a batch of this rank's samples, each of which was collated alone: its strings become :class:`Texts`."""
    return mapped(batch, lambda one: Texts(one) if _are_texts(one) else INSIDE)


def _are_texts(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and len(one) > 0 and all(isinstance(entry, (str, bytes)) for entry in one)


def rows_collated(collate: Callable[[Any], Any], share: Share, samples: Any) -> Any:
    """Collate a whole batch and return the rows of one part.

    Collators that pad look at all samples of a batch, and collators that draw random numbers draw those of all.

    Args:
        collate: the collator of whole batches.
        share: the part to keep.
        samples: those of the whole batch.
    """
    if share.parts == 1:
        return collate(samples)
    samples = list(samples) if isinstance(samples, Iterable) else samples
    return rows_of(collate(samples), share, len(samples) if isinstance(samples, list) else 0)


def only_stacks(collate: Any) -> bool:
    """Return whether a collator treats each sample alone, whatever the others of the batch are."""
    collate = getattr(collate, "data_collator", collate)
    transformers = sys.modules.get("transformers")
    return collate is default_collate or (
        transformers is not None and collate is getattr(transformers, "default_data_collator", None)
    )


def tensors_of(batch: Any) -> list[Tensor | numpy.ndarray[Any, Any]]:
    """Return the tensors and arrays of a batch, in containers that ``rows_of`` takes."""
    return found_in(batch, (Tensor, numpy.ndarray))


def rows_of(batch: Any, share: Share, samples: int = 0) -> Any:
    """Return the rows of a batch that belong to a share; a :class:`WholeBatch` if its rows are not known.

    They are not if tensors differ in their first dimension, or a value is of a type without parts.

    What is no tensor is kept whole: a loop runs as one process. A list of tensors is split if it has one for each row.

    Args:
        batch: tensors, arrays and plain values in containers, see :func:`zerograph.loops.containers.mapped`.
        share: the part.
        samples: number of samples of the batch. A tensor may have several rows for each, as pairs of texts have.
    """
    sizes = {len(tensor) for tensor in found_in(batch, Tensor) if tensor.ndim}
    several = samples > 0 and all(size % samples == 0 for size in sizes)
    if len(sizes) > 1 and not several:
        return WholeBatch(batch, "its tensors have different numbers of rows")
    count = samples if several else next(iter(sizes), 0)
    rows, unknown = share.rows(count), list[str]()

    def rows_of_tensor(tensor: Tensor) -> Tensor:
        times = len(tensor) // count if count else 1
        return tensor[rows.start * times : rows.stop * times].clone()

    def own(value: Any) -> Any:
        if isinstance(value, GlobalTensor):
            # Of a prepared loader that is read by another iterable.
            return value
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                unknown.append(f"tensor of layout {value.layout}")
                return value
            return rows_of_tensor(value) if value.ndim else value
        if isinstance(value, Texts):
            return Texts(value.values[rows])
        if isinstance(value, (*PLAIN, numpy.ndarray)):
            return value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and len(value) == count:
            nested = any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in value)
            return INSIDE if nested else value
        if not has_parts(value):
            unknown.append(type(value).__name__)
            return value
        return INSIDE

    result = mapped(batch, own)
    return WholeBatch(batch, f"it has a {unknown[0]}") if unknown else result
