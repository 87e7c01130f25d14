"""``backward()`` under mixed precision: outside autocast, from a scaled loss, and its gradients unscaled behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.ir.finite_check import Overflow
from zerograph.ir.gradient_edits import TOTAL_NORM


class Backward:
    """What ``torch.autograd.backward`` does while ``build()`` is traced.

    As with ``torch.amp.GradScaler``, ``scale(loss).backward()`` comes first and ``unscale_()`` behind the last of them,
    so that whatever ``build()`` then does to gradients sees them as they are.

    Args:
        device: type of the device that autocast was entered for.
        scale: the 0-d loss scale; None for none.
        calls: of how many calls to ``backward()`` the last is awaited.
        parameters: those whose gradients are unscaled then, by name.
        trained: the names of each optimizer's parameters, by the optimizer's name in the graph.

    Attributes:
        count: calls so far.
        roots: the tensors that it was called on, unscaled.
        overflows: of each optimizer with gradients; none until the last call. Gradients of no optimizer do not count,
            as with ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: str,
        scale: Tensor | None,
        calls: int,
        parameters: Mapping[str, Tensor],
        trained: Mapping[str, Collection[str]],
    ) -> None:
        self.count = 0
        self.roots: list[Tensor] = []
        self.overflows: list[Overflow] = []
        self._device, self._scale, self._calls = device, scale, calls
        self._parameters, self._trained = parameters, trained

    @contextmanager
    def instead_of_torchs(self) -> Iterator[None]:
        """Inside, ``loss.backward()`` and ``torch.autograd.backward`` are this."""
        with _torch.replaced_backward(self._run):
            yield

    def checked(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return those whose overflow is known: of no optimizer's an overflow could not be told from other causes."""
        updated = {name for names in self._trained.values() for name in names}
        return [gradient for name, gradient in gradients.items() if self._scale is None or name in updated]

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
        with_gradient = {name: one for name, one in self._parameters.items() if one.grad is not None}
        for optimizer, names in self._trained.items():
            own = [one.grad for name, one in with_gradient.items() if name in names]
            if own:
                largest = TOTAL_NORM(own, float("inf"))
                name = optimizer if len(self._trained) > 1 else ""
                self.overflows.append(Overflow(name, largest, torch.isfinite(largest).logical_not().float()))
        inverse = scale.double().reciprocal().float()
        for parameter in with_gradient.values():
            parameter.grad = parameter.grad * inverse  # type: ignore[operator]
