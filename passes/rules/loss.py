"""Losses that are kernels of their own: one number per sample, from that sample alone.

A loss that reduces over the batch is decomposed into one without reduction and a sum, so that means divide by the
global count; see ``zerograph/capture/decompositions.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerograph.ops.ctc_loss import CTC_LOSS, CTC_LOSS_BACKWARD
from zerograph.passes.rules.registry import Operands, rule, whole

aten = torch.ops.aten


def _by_sample(inputs: list[str], outputs: str) -> Callable[[Operands], str]:
    """Return a notation for batches; the last of ``inputs``, a weight, may be absent."""

    def notation(operands: Operands) -> str:
        batched = all(value.dim() for value in operands.inputs) and operands["reduction"] == 0
        if not batched:
            return whole(operands)
        return ", ".join(inputs[: len(operands.inputs)]) + " -> " + outputs

    return notation


rule(aten.multi_margin_loss.default, _by_sample(["n c!", "n", "c!"], "n"))
rule(aten.multi_margin_loss_backward.default, _by_sample(["n", "n c!", "n", "c!"], "n c!"), linear=(0,))
rule(aten.multilabel_margin_loss_forward.default, _by_sample(["n c!", "n c!"], "n, n c!"))
rule(aten.multilabel_margin_loss_backward.default, _by_sample(["n", "n c!", "n c!", "n c!"], "n c!"), linear=(0,))


def _ctc(operands: Operands, inputs: tuple[Tensor, ...], gradient: str, result: str) -> str:
    """Return the notation of CTC loss. Targets with a row per sample can be split, concatenated ones cannot."""
    if inputs[1].dim() != 2:
        return whole(operands)
    return f"{gradient}t! n c!, n s!, n, n -> {result}"


rule(CTC_LOSS, lambda operands: _ctc(operands, operands.inputs, "", "n"), batch=0)
rule(
    CTC_LOSS_BACKWARD,
    lambda operands: _ctc(operands, operands.inputs[1:], "n, ", "t! n c!"),
    linear=(0,),
    batch=0,
)
