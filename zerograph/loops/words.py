"""The names of a loop's calls in messages: a loop of plain PyTorch, or one of another system's engine."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """The names that the user's code has for the parts of a loop.

    Attributes:
        model: the recorded model, with an article.
        call: a call of the model.
        criterion: a call of a criterion that sees the whole batch.
        backward: the call that records a loss.
        step: the call that makes the update.
        zero_grad: the call that discards losses.
        clip: how to clip gradients.
        precision: what chooses the precision.
    """

    model: str = "a prepared model"
    call: str = "model(...)"
    criterion: str = "criterion(output, y, mask), with a criterion from zg.prepare(),"
    backward: str = "loss.backward()"
    step: str = "optimizer.step()"
    zero_grad: str = "optimizer.zero_grad()"
    clip: str = "torch.nn.utils.clip_grad_norm_()"
    precision: str = "The step computes in the precision of its configuration: config.enable_amp(dtype=torch.bfloat16)."


_DEFAULT = Words()
_current: ContextVar[Words] = ContextVar("words")


def speak(words: Words) -> Words:
    """Use ``words`` in messages from now on, and return them."""
    _current.set(words)
    return words


def words() -> Words:
    """Return the words of the loop that was recorded last."""
    return _current.get(_DEFAULT)
