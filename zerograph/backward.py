"""``backward()`` under mixed precision: outside autocast, from a scaled loss, and its gradients unscaled behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.gradients import TOTAL_NORM


class Backward:
    """What ``torch.autograd.backward`` does while ``build()`` is traced.

    As with ``torch.amp.GradScaler``, ``scale(loss).backward()`` comes first and ``unscale_()`` behind the last of them,
    so that whatever ``build()`` then does to gradients sees them as they are.

    Args:
        device: type of the device that autocast was entered for.
        scale: the 0-d loss scale; None for none.
        calls: of how many calls to ``backward()`` the last is awaited.
        parameters: those whose gradients are unscaled then.

    Attributes:
        count: calls so far.
        roots: the tensors that it was called on, unscaled.
        overflow: the largest scaled gradient, and 1.0 where that is infinite or not a number, else 0.0; None until the
            last call.
    """

    def __init__(self, device: str, scale: Tensor | None, calls: int, parameters: Iterable[Tensor]) -> None:
        self.count = 0
        self.roots: list[Tensor] = []
        self.overflow: tuple[Tensor, Tensor] | None = None
        self._device, self._scale, self._calls, self._parameters = device, scale, calls, list(parameters)

    @contextmanager
    def instead_of_torchs(self) -> Iterator[None]:
        """Inside, ``loss.backward()`` and ``torch.autograd.backward`` are this."""
        with _torch.backward_by(self._run):
            yield

    def _run(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _torch.backward_sequence_number() is not None:
            # A reentrant checkpoint calls it inside of it: the gradients that it goes on from are scaled already.
            original(tensors, *args, **kwargs)
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self.roots += roots
        if self._scale is not None:
            tensors = [root * self._scale for root in roots]
        # Each operator's backward computes in the dtype of its forward; autocast would cast once more.
        with self._outside_autocast():
            original(tensors, *args, **kwargs)
            self.count += 1
            if self._scale is not None and self.count == self._calls:
                self._unscale(self._scale)

    def _outside_autocast(self) -> AbstractContextManager[Any]:
        # Not every device has it: meta tensors, for which a step can be prepared, do not.
        available = torch.amp.is_autocast_available(self._device)
        return torch.autocast(self._device, enabled=False) if available else nullcontext()

    @torch.no_grad()
    def _unscale(self, scale: Tensor) -> None:
        found = [parameter for parameter in self._parameters if parameter.grad is not None]
        largest = TOTAL_NORM([parameter.grad for parameter in found], float("inf"))
        self.overflow = largest, torch.isfinite(largest).logical_not().float()
        inverse = scale.double().reciprocal().float()
        for parameter in found:
            parameter.grad = parameter.grad * inverse  # type: ignore[operator]
