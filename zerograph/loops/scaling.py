"""``torch.amp.GradScaler`` over prepared optimizers: gradients are unscaled where they are kept, as split sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.loops.loop import Loop


def unscale_(parameters: Sequence[nn.Parameter], inverse: Tensor) -> Tensor:
    """Multiply gradients by the inverse of the loss scale; return 1.0 if one of them is not finite, else 0.0."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    largest = nn.utils.get_total_norm(gradients, float("inf"))
    for gradient in gradients:
        gradient.mul_(inverse.to(gradient.dtype))
    return torch.isfinite(largest).logical_not().to(torch.promote_types(largest.dtype, torch.float32))


def step_scaled(loop: Loop, optimizer: torch.optim.Optimizer) -> None:
    """Make an update as ``GradScaler.step()`` asks for it.

    Of a fused optimizer it does not unscale the gradients: it leaves the scale and the overflow flag as attributes.
    """
    found, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    if found is not None and found.item():
        _torch.mark_step_called(optimizer)
        return
    if scale is not None:
        _unscale(optimizer, scale.double().reciprocal().float())
    loop.step(optimizer)


@functools.cache
def replace_unscaling() -> None:
    """Let ``GradScaler`` unscale the gradients of prepared optimizers by a graph, without gathering them."""
    _torch.replace_unscaling(_unscale)


def _unscale(optimizer: torch.optim.Optimizer, inverse: Tensor) -> Tensor | None:
    """Unscale the gradients of a prepared optimizer; return the overflow flag, or None for any other optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loop: Loop | None = getattr(parameters[0], "_zerograph_loop", None) if parameters else None
    if loop is None:
        return None
    found = loop.edit(unscale_, parameters, (inverse,), {})
    value: Tensor = found.tape.value(found)
    return value.float()
