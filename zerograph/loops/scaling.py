"""``torch.amp.GradScaler`` over prepared optimizers: gradients are unscaled where they are kept, as split sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.loops.loop import Loop
from zerograph.runtime.parameters import parameters_of


def step_scaled(loop: Loop, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Make an update as ``GradScaler.step()`` asks for it.

    Of a fused optimizer it does not unscale the gradients: it leaves the scale and the overflow flag as attributes.
    """
    own = vars(optimizer)
    flags: dict[str, Any] = {name: own.pop(name) for name in ("found_inf", "grad_scale") if name in own}
    found, scale = flags.get("found_inf"), flags.get("grad_scale")
    # Without them while the update is traced: it does not unscale.
    try:
        if found is not None and found.item():
            _torch.mark_step_called(optimizer)
            return None
        if scale is not None:
            loop.unscale(optimizer, scale.double().reciprocal().float())
        return loop.step(optimizer, closure)
    finally:
        own.update(flags)


@functools.cache
def replace_unscaling() -> None:
    """Let ``GradScaler`` unscale the gradients of prepared optimizers without gathering them."""
    _torch.replace_unscaling(_unscale)


def _unscale(optimizer: torch.optim.Optimizer, inverse: Tensor) -> Tensor | None:
    """Unscale the gradients of a prepared optimizer; return the overflow flag, or None for any other optimizer."""
    parameters = parameters_of(optimizer)
    loop: Loop | None = getattr(parameters[0], "_zerograph_loop", None) if parameters else None
    is_finite = None if loop is None else loop.unscale(optimizer, inverse)
    if is_finite is None:
        return None
    # Not of the default dtype, which may be fp64.
    return torch.full((), float(not is_finite), dtype=torch.float32, device=inverse.device)
