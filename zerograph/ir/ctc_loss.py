"""Operators of our own, where a kernel of torch yields shapes that depend on values."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("zerograph::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The negative log likelihood of each sample. Its forward variables, as long as the longest target, stay inside."""
    found = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    loss: Tensor = found[0]
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
    """The gradient of ``log_probs``; the forward variables are computed again."""
    given = (log_probs, targets, input_lengths, target_lengths)
    loss, alpha = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    slope: Tensor = aten._ctc_loss_backward.Tensor(gradient, *given, loss, alpha, blank, zero_infinity)
    return slope


@ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_loss_backward.register_fake
def _(gradient: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]
    ctx.options = blank, zero_infinity  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors  # type: ignore[attr-defined]
    return ctc_loss_backward(gradient, *given, *ctx.options), None, None, None, None, None  # type: ignore[attr-defined]


ctc_loss.register_autograd(_backward, setup_context=_keep)

# As they stand in a graph.
CTC_LOSS = torch.ops.zerograph.ctc_loss.default
CTC_LOSS_BACKWARD = torch.ops.zerograph.ctc_loss_backward.default
