"""Rows of batches: which of them a rank keeps of a batch that all ranks collate."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import default_collate

from zerograph._torch import pytree
from zerograph.errors import InputError
from zerograph.loops.containers import PLAIN


@dataclass(frozen=True)
class RowsOf:
    """A collator that collates a whole batch and keeps the rows of one part.

    Collators that pad look at all samples of a batch, and collators that draw random numbers draw those of all.

    Args:
        collate: the collator of whole batches.
        part: the part to keep.
        parts: number of parts.
    """

    collate: Callable[[Any], Any]
    part: int
    parts: int

    def __call__(self, samples: Any) -> Any:
        """Return this part of the batch of these samples."""
        if self.parts == 1:
            return self.collate(samples)
        samples = list(samples) if isinstance(samples, Iterable) else samples
        count = len(samples) if isinstance(samples, list) else 0
        return rows_of(self.collate(samples), self.part, self.parts, count)


def only_stacks(collate: Any) -> bool:
    """Return whether a collator treats each sample alone, whatever the others of the batch are."""
    collate = getattr(collate, "data_collator", collate)
    transformers = sys.modules.get("transformers")
    return collate is default_collate or (
        transformers is not None and collate is getattr(transformers, "default_data_collator", None)
    )


def bounds(count: int, part: int, parts: int) -> slice:
    """Return the rows of a part: contiguous, and as many as of any other, or one more."""
    least, more = divmod(count, parts)
    start = part * least + min(part, more)
    return slice(start, start + least + (part < more))


def tensors_of(batch: Any) -> Iterator[Tensor | numpy.ndarray[Any, Any]]:
    """Yield the tensors and arrays of a batch, in containers that ``rows_of`` takes."""
    if isinstance(batch, (Tensor, numpy.ndarray)):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)
    elif not isinstance(batch, PLAIN) and not _is_leaf(batch):
        yield from tensors_of(pytree.tree_leaves(batch))
    elif hasattr(batch, "__dict__"):
        yield from tensors_of(vars(batch))


def rows_of(batch: Any, part: int, parts: int, samples: int = 0) -> Any:
    """Return the rows of a batch that belong to one part.

    Tensors and arrays without dimensions, numbers and strings are kept. A list of other values is split if it has an
    entry for each row.

    Args:
        batch: tensors, arrays and plain values in mappings, lists, tuples and classes that are registered with pytree.
        part: the part.
        parts: number of parts.
        samples: number of samples of the batch. A tensor may have several rows for each, as pairs of texts have.

    Raises:
        InputError: the rows are not known: tensors differ in their first dimension, or a value is of another type.
    """
    sizes = {len(tensor) for tensor in tensors_of(batch) if tensor.ndim}
    several = samples > 0 and all(size % samples == 0 for size in sizes)
    if len(sizes) > 1 and not several:
        raise InputError(
            f"the tensors of a batch have {', '.join(map(str, sorted(sizes)))} rows, of which zerograph does not know "
            "the ranks' parts\nThe first dimension of every tensor of a batch must be the samples."
        )
    count = samples if several else next(iter(sizes), 0)
    rows = bounds(count, part, parts)

    def rows_of_tensor(tensor: Any) -> Any:
        times = len(tensor) // count if count else 1
        own = tensor[rows.start * times : rows.stop * times]
        return own.clone() if isinstance(own, Tensor) else own.copy()

    def own(value: Any) -> Any:
        if isinstance(value, (Tensor, numpy.ndarray)):
            return rows_of_tensor(value) if value.ndim else value
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, Mapping):
            # Such as a BatchEncoding, which holds more than its entries.
            mapping: Any = copy.copy(value)
            if hasattr(mapping, "data") and isinstance(mapping.data, dict):
                mapping.data = dict(mapping.data)
            for key in list(mapping):
                mapping[key] = own(mapping[key])
            return mapping
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(own, value))
        if isinstance(value, (list, tuple)):
            nested = any(isinstance(one, (Tensor, numpy.ndarray, Mapping, list, tuple)) for one in value)
            if not nested and len(value) == count:
                return value[rows]
            return type(value)(map(own, value))
        if _is_leaf(value) and hasattr(value, "__dict__"):
            new = copy.copy(value)
            # Past __setattr__, which frozen classes refuse.
            vars(new).update({name: own(member) for name, member in vars(value).items()})
            return new
        if _is_leaf(value):
            raise InputError(
                f"a batch has a {type(value).__name__}, of which zerograph does not know the ranks' parts\n"
                "Let a loader yield tensors, arrays and numbers in lists, tuples, dicts, or objects with attributes."
            )
        leaves, spec = pytree.tree_flatten(value)
        return pytree.tree_unflatten([own(leaf) for leaf in leaves], spec)

    return own(batch)


def _is_leaf(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return len(leaves) == 1 and leaves[0] is value
