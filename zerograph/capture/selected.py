"""Elements that a mask selects, of which only a sum or a mean is taken: ``x.masked_select(mask).sum()``.

Their number depends on values, which no graph can do. The sum and the mean do not need it. The CTC loss takes such
elements as targets, whose lengths it is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.base.source import refusal
from zerograph.errors import CaptureError


class Selected(Tensor):
    """The elements of a tensor that a mask selects; it has no data and no shape.

    Attributes:
        source: the tensor.
        mask: of the same shape.
    """

    source: Tensor
    mask: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selection = args[0] if args else None
        if isinstance(selection, Selected) and not args[1:] and not kwargs:
            zeros = torch.zeros((), dtype=selection.source.dtype, device=selection.source.device)
            if func in (Tensor.neg, Tensor.__neg__, torch.neg, Tensor.float, Tensor.detach):
                return selected(func(selection.source), selection.mask)
            if func in (Tensor.sum, torch.sum):
                return torch.where(selection.mask, selection.source, zeros).sum()
            if func in (Tensor.mean, torch.mean):
                return torch.where(selection.mask, selection.source, zeros).sum() / selection.mask.sum()
        raise _refused()

    def rows_packed(self) -> Tensor:
        """Return a tensor of the source's shape in which each row begins with its selected elements, in order."""
        order = self.mask.logical_not().long().argsort(stable=True, dim=-1)
        return self.source.gather(-1, order)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refused()


def _refused() -> CaptureError:
    return refusal(
        "the number of elements that a mask selects depends on values",
        "Only sum(), mean() and the CTC loss of them can be computed: multiply by the mask, or use torch.where.",
    )


def is_mask_of(tensor: Any, index: Any) -> bool:
    """Return whether ``index`` is a mask of all elements of ``tensor``."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and tuple(index.shape) == tuple(tensor.shape)


def selected(tensor: Tensor, mask: Tensor) -> Selected:
    """Return the elements of ``tensor`` where ``mask`` is true."""
    new: Selected = _torch.tensor_without_data(Selected, (0,), tensor.dtype, tensor.device, requires_grad=False)
    new.source, new.mask = tensor, mask
    return new
