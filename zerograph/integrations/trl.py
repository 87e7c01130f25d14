"""Functions of TRL that cannot be traced, or not sample by sample."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """Make TRL's fused LM head compute as PyTorch does, without buffers for a fixed number of tokens."""
    utils: Any = sys.modules.get("trl.trainer.utils")
    with contextlib.ExitStack() as stack:
        if hasattr(utils, "_ChunkedLogProbFunction"):
            stack.enter_context(patch.object(utils, "_ChunkedLogProbFunction", _LogProbs))
            # Triton's path picks the tokens with a label, so that its shapes depend on values.
            stack.enter_context(patch.object(utils, "_use_triton", lambda device: False))
        yield


class _LogProbs:
    """As TRL's autograd function of this name, with all logits at once."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [tokens, width]
        weight: Tensor,  # [vocabulary, width]
        bias: Tensor | None,
        targets: Tensor,  # [tokens]
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """Return the target's log-probability, and of ``outputs`` those that are wanted, of each token."""
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = squares = mean = first = None
        if "entropy" in outputs:
            entropy = -(log_p.exp() * log_p).sum(-1)
        if "log_sum_sq_probs" in outputs:
            squares = (2 * log_p.detach()).logsumexp(-1)
        if "mean_logits" in outputs:
            mean = logits.detach().mean(-1)
        if "is_top1" in outputs:
            first = logits.detach().argmax(-1) == targets
        return chosen, entropy, squares, mean, first
