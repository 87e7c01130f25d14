"""Run ``backward()`` under mixed precision: outside autocast, from a scaled loss, and unscale its gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.ir.finite_check import Overflow
from zerograph.ir.gradient_edits import TOTAL_NORM


class Backward:
    """The replacement of ``torch.autograd.backward`` while ``build()`` is traced.

    Its order is that of ``torch.amp.GradScaler``: every call starts from the scaled loss, and the last one unscales the
    gradients. So ``build()`` then edits unscaled gradients.

    Args:
        device: type of the device that autocast was entered for.
        scale: the loss scale, 0-d; None for none.
        expected_calls: the call of this number is the last one.
        parameters: the parameters whose gradients are unscaled, by name.
        trained: the names of each optimizer's parameters, by the optimizer's name in the graph.

    Attributes:
        calls: number of calls so far.
        roots: the unscaled tensors that it was called on.
        overflows: the overflow of each optimizer with gradients; empty until the last call. Gradients of parameters
            without an optimizer do not count, as with ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: str,
        scale: Tensor | None,
        expected_calls: int,
        parameters: Mapping[str, Tensor],
        trained: Mapping[str, Collection[str]],
    ) -> None:
        self.calls = 0
        self.roots: list[Tensor] = []
        self.overflows: list[Overflow] = []
        self._device, self._scale, self._expected_calls = device, scale, expected_calls
        self._parameters, self._trained = parameters, trained

    @contextmanager
    def replacing_torchs(self) -> Iterator[None]:
        """Make ``loss.backward()`` and ``torch.autograd.backward`` run this."""
        with _torch.replaced_backward(self._run):
            yield

    def checked_gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients to check for finite values.

        Under loss scaling these are the gradients with an optimizer: in others an overflow looks like any other cause.
        """
        updated = {name for names in self._trained.values() for name in names}
        return [gradient for name, gradient in gradients.items() if self._scale is None or name in updated]

    def _run(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _torch.backward_sequence_number() is not None:
            # A reentrant checkpoint calls backward() inside backward(): its gradients are scaled already.
            original(tensors, *args, **kwargs)
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self.roots += roots
        if self._scale is not None:
            tensors = [root * self._scale for root in roots]
        # Each operator's backward computes in the dtype of its forward; autocast would cast once more.
        # Meta tensors, for which a step can be prepared, have no autocast.
        available = torch.amp.is_autocast_available(self._device)
        with torch.autocast(self._device, enabled=False) if available else nullcontext():
            original(tensors, *args, **kwargs)
            self.calls += 1
            if self.calls == self._expected_calls:
                self.unscale()

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the gradients by the scale, if there is one, and note which overflowed."""
        if self._scale is None:
            return
        with_gradient = {name: tensor for name, tensor in self._parameters.items() if tensor.grad is not None}
        for optimizer, names in self._trained.items():
            gradients = [tensor.grad for name, tensor in with_gradient.items() if name in names]
            if gradients:
                largest = TOTAL_NORM(gradients, float("inf"))
                name = optimizer if len(self._trained) > 1 else ""
                self.overflows.append(Overflow(name, largest, torch.isfinite(largest).logical_not().float()))
        inverse = self._scale.double().reciprocal().float()
        for parameter in with_gradient.values():
            parameter.grad = parameter.grad * inverse  # type: ignore[operator]
