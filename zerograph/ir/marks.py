"""Marks of inputs: dimensions that are dynamic from the first call on."""

from __future__ import annotations

from torch import Tensor

from zerograph.errors import InputError
from zerograph.ir.dims import SMALLEST_DYNAMIC

# Each marked dimension with its smallest and largest size.
Marks = tuple[tuple[int, tuple[int, int | None]], ...]


def mark_dynamic(tensor: Tensor, dim: int, *, min: int | None = None, max: int | None = None) -> None:
    """Make a dimension of an input dynamic from the first call on.

    Args:
        tensor: an input of a graph. The mark belongs to this tensor, as torch's own ``torch._dynamo.mark_dynamic``,
            whose marks count too.
        dim: the dimension.
        min, max: smallest and largest size of the tensor, for dimension 0 of a plain input the rows of one rank. A call
            with another size is an error, except for a rank without rows. Memory is predicted for the largest, and
            keeps ``config.memory.memory_budget`` there.

    Raises:
        InputError: no such dimension, or limits that no size keeps.
    """
    if not isinstance(tensor, Tensor) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"mark_dynamic({tensor!r:.60}, {dim!r}): pass a tensor and one of its dimensions")
    if (min is not None and min < 0) or (max is not None and max < (min or SMALLEST_DYNAMIC)):
        raise InputError(f"mark_dynamic(min={min}, max={max}): pass limits that some size from 2 up keeps")
    marks = vars(tensor).setdefault("_zerograph_dynamic", {})
    marks[dim % tensor.dim()] = min or 0, max


_ATTRIBUTES = ("_zerograph_dynamic", "_dynamo_dynamic_indices", "_dynamo_dynamic_range")


def copy_marks(old: Tensor, new: Tensor) -> Tensor:
    """Mark the same dimensions of another tensor, and return that."""
    vars(new).update({name: value for name, value in vars(old).items() if name in _ATTRIBUTES})
    return new


def marks_of(tensor: Tensor) -> Marks:
    """Return the limits of each dimension of a tensor that is marked as dynamic, by us or by torch."""
    if not vars(tensor):
        return ()
    unlimited: tuple[int, int | None] = (0, None)
    marks = dict.fromkeys(getattr(tensor, "_dynamo_dynamic_indices", ()), unlimited)
    for limits in getattr(tensor, "_dynamo_dynamic_range", ()):
        marks[limits.dim] = limits.min or 0, limits.max
    return tuple(sorted({**marks, **getattr(tensor, "_zerograph_dynamic", {})}.items()))
