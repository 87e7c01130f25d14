"""The CTC loss as operators with fixed shapes: the kernel of torch has results whose shapes depend on values."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("zerograph::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Return the negative log likelihood of each sample [batch].

    The forward variables, whose size depends on the longest target, are not returned.
    """
    loss: Tensor = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return loss


@torch.library.custom_op("zerograph::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the gradient of ``log_probs``; recompute the forward variables."""
    inputs = (log_probs, targets, input_lengths, target_lengths)
    loss, alpha = aten._ctc_loss.Tensor(*inputs, blank, zero_infinity)
    grad: Tensor = aten._ctc_loss_backward.Tensor(gradient, *inputs, loss, alpha, blank, zero_infinity)
    return grad


@ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_loss_backward.register_fake
def _(gradient: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    # As the kernel does, whatever the layout of log_probs is.
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]
    ctx.options = blank, zero_infinity  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors  # type: ignore[attr-defined]
    return ctc_loss_backward(gradient, *inputs, *ctx.options), None, None, None, None, None  # type: ignore[attr-defined]


ctc_loss.register_autograd(_backward, setup_context=_save)

# The operators in a graph.
CTC_LOSS = torch.ops.zerograph.ctc_loss.default
CTC_LOSS_BACKWARD = torch.ops.zerograph.ctc_loss_backward.default
