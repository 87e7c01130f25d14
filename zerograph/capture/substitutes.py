"""Functions of torch.nn that cannot be traced, or not sample by sample, and what stands for them during capture.

They read values, or make shapes of values, where the same numbers can be had without. Torch's loss scaling, which the
graph has in its own way, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base import source
from zerograph.capture import wrappers
from zerograph.errors import CaptureError
from zerograph.ir.ctc_loss import ctc_loss


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """Inside, torch.nn uses our forms of what it could not be traced with."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss))
        stack.enter_context(patch.object(F, "ctc_loss", _ctc_loss))
        stack.enter_context(patch.object(F, "embedding", _dense_embedding(F.embedding)))
        stack.enter_context(patch.object(F, "embedding_bag", _bags(F.embedding_bag)))
        batch_norm = nn.modules.batchnorm._BatchNorm
        stack.enter_context(patch.object(batch_norm, "forward", _averaging(batch_norm.forward)))
        stack.enter_context(patch.object(torch, "bincount", _counting(torch.bincount)))
        stack.enter_context(patch.object(Tensor, "bincount", _counting(Tensor.bincount)))
        stack.enter_context(patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_log_softmax))
        for name in ("scale", "unscale_", "step", "update"):
            refusing = _unless_enabled(getattr(torch.amp.GradScaler, name))
            stack.enter_context(patch.object(torch.amp.GradScaler, name, refusing))
        stack.enter_context(_torch.trusted_causal_flags())
        stack.enter_context(wrappers.seen_through())
        yield


def _unless_enabled(method: Any) -> Any:
    """torch's scaler looks at the values of gradients, and keeps its scale outside of the step."""

    def refusing(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return method(self, *args, **kwargs)
        line, code = source.running_line()
        raise CaptureError(
            f"build() scales its loss by a torch.amp.GradScaler\n  {line}   {code}\n"
            "Leave it out, call loss.backward(), and set config.grad_scaler = zg.GradScaler(): the graph scales the "
            "loss, skips steps that overflow, and changes the scale."
        )

    return refusing


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """As torch's, except that negative variances are clamped without being refused first: that would read them."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    # The clamp does not count in backward.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Torch's kernel as an operator of fixed shapes, one number per sample."""
    lengths = [torch.as_tensor(one, device=log_probs.device).long() for one in (input_lengths, target_lengths)]
    if log_probs.dim() == 2:
        first, second = (one.reshape(1) for one in lengths)
        return _ctc_loss(log_probs[:, None], targets[None], first, second, blank, reduction, zero_infinity).squeeze()
    loss = ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss.isinf(), 0, loss)
    return _reduced(loss / lengths[1].clamp(min=1) if reduction == "mean" else loss, reduction)


def _dense_embedding(plain: Any) -> Any:
    """Return a lookup whose gradient is dense: ``sparse=True`` gives the same numbers in another layout."""

    @functools.wraps(plain)
    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        result: Tensor = plain(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
        return result

    return embedding


def _averaging(plain: Any) -> Any:
    """Return the forward of batch norm that averages over all batches (``momentum=None``) without reading the count."""

    @functools.wraps(plain)
    def forward(self: Any, input: Tensor) -> Tensor:
        count = self.num_batches_tracked
        if self.momentum is not None or not self.training or not self.track_running_stats or count is None:
            result: Tensor = plain(self, input)
            return result
        self._check_input_dim(input)
        count.add_(1)
        # The statistics of this batch alone: those that a momentum of 1 leaves.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        normed = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for running, batch in ((self.running_mean, mean), (self.running_var, var)):
            share = 1.0 / count.to(running.dtype)
            running.copy_(running * (1 - share) + batch * share)
        return normed

    return forward


def _counting(plain: Any) -> Any:
    """Return a ``bincount`` of ``minlength`` bins, if that is given; a larger value is an error when the step runs."""

    @functools.wraps(plain)
    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength or input.dim() != 1:
            result: Tensor = plain(input, weights, minlength)
            return result
        if weights is None:
            each = torch.ones_like(input, dtype=torch.int64)
        else:
            each = weights if weights.dtype == torch.float32 else weights.double()
        return each.new_zeros(minlength).index_add(0, input.long(), each)

    return bincount


def _bags(plain: Any) -> Any:
    """Bags of one size are rows of a lookup, which is by sample; torch's kernel is told offsets into the batch."""

    def embedding_bag(
        input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        names = ["norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights"]
        names += ["include_last_offset", "padding_idx"]
        # A sparse gradient has the same numbers in another layout.
        options = {**dict(zip(names, args, strict=False)), **kwargs, "sparse": False}
        mode, padding = options.get("mode", "mean"), options.get("padding_idx")
        if input.dim() != 2 or max_norm is not None or (mode == "max" and padding is not None):
            result: Tensor = plain(input, weight, offsets, max_norm, **options)
            return result
        rows = F.embedding(input, weight, padding, scale_grad_by_freq=options.get("scale_grad_by_freq", False))
        if mode == "max":
            return rows.amax(1)
        counts = torch.ones_like(input, dtype=weight.dtype) if padding is None else (input != padding).to(weight.dtype)
        scale = options.get("per_sample_weights")
        total = (rows * (counts if scale is None else counts * scale).unsqueeze(-1)).sum(1)
        return total if mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1)

    return embedding_bag


def _adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """Every cluster for every sample, of which each takes its own; torch selects the samples of a cluster first."""
    x, target = (input_, target_) if target_.dim() else (input_[None], target_[None])
    found = self.log_prob(x).gather(1, target[:, None]).squeeze(1)
    output = found if target_.dim() else found.squeeze(0)
    return _torch.adaptive_output(output, (-found).mean())
