"""Find sums over the batch that are divided by a count of this rank's samples, which gives no mean.

A recorded sum is over the whole batch; a count that the loop computes from a real tensor is of this rank's part. Their
quotient is too large by the number of parts, and neither a shape nor a difference between ranks shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.loops.deferred import Meta, Reduction
from zerograph.loops.tape import Operand
from zerograph.loops.words import words

_DIVIDES = ("div", "divide", "true_divide", "__truediv__", "__div__")
_MULTIPLIES = ("mul", "multiply", "__mul__", "__rmul__")
_SUMS = ("sum", "nansum", "dot", "vdot", "inner")
_KEEPS = ("neg", "abs", "add", "sub", "detach", "clone", "float", "double", "to", "squeeze", "view", "reshape")


def mark_reduction(function: Callable[..., Any], arguments: Sequence[Any], result: Any, *, opaque: bool) -> Any:
    """Return a call's result, marked as a sum or a mean over the batch if it is one.

    Args:
        function: the function that is called.
        arguments: the arguments, flat, with operands as they enter the step.
        result: one leaf of the result.
        opaque: the function is the model or the criterion.
    """
    if not isinstance(result, Meta):
        return result
    name = getattr(function, "__name__", "")
    metas = [argument.meta for argument in arguments if isinstance(argument, Operand)]
    by = _factor(name, arguments)
    divided = any(argument.divided for argument in metas) or (by is not None and not isinstance(by, float))
    if result.batch_dim is not None:
        return replace(result, divided=divided and not opaque)
    sizes = frozenset().union(*(_counts(argument) for argument in metas))
    reduction: Reduction = None
    if any(argument.batch_dim is not None for argument in metas):
        reduction = _reduces(function, name, arguments, opaque=opaque) or result.reduction
    elif not opaque and name in (*_DIVIDES, *_MULTIPLIES, *_KEEPS):
        reductions = {
            argument.meta.reduction for argument in arguments if isinstance(argument, Operand) and not argument.real
        }
        # A sum divided by a sum is a mean.
        by_sum = name in _DIVIDES and len(metas) == 2 and metas[1].reduction == "sum"
        reduction = "mean" if by_sum or reductions == {"mean"} else "sum" if "sum" in reductions else None
    return replace(result, reduction=reduction, counts=sizes, divided=divided and not opaque)


def check_division(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    results: Sequence[Any],
    parts: int,
    warn: Callable[[str], None],
) -> None:
    """Report a sum over the batch that is divided by a possible count of this rank's samples.

    A tensor from outside the step as divisor is an error, a plain number a warning.

    Raises:
        CaptureError: with the user's line and advice.
    """
    name = getattr(function, "__name__", "")
    first = next((result for result in results if isinstance(result, Meta)), None)
    if parts == 1 or first is None:
        return
    if first.reduction == "sum" and name in _SUMS and first.divided:
        warn(
            f"what is summed over the batch was divided by a number, or by a tensor, from outside the step{_here()}\n"
            f"If that counts this rank's samples: the sum is that of the whole batch, {parts} times as many. "
            "Take the mean, or let the criterion count."
        )
        return
    if (by := _factor(name, arguments)) is None:
        return
    value = next(argument.meta for argument in arguments if isinstance(argument, Operand) and argument is not by)
    if value.batch_dim is not None:
        return
    divides = name in _DIVIDES
    if isinstance(by, Operand):
        if value.reduction == "sum" or (divides and value.reduction is None and not value.shape):
            what = "a sum over the batch" if value.reduction == "sum" else "a result of the batch, perhaps a sum,"
            raise CaptureError(
                f"{what} is {'divided' if divides else 'multiplied'} by a tensor from outside the step"
                f"{_here()}\nSums are those of the whole batch, {parts} times this rank's part: with a count of this "
                f"rank's samples the result would be {parts} times too large. Let the criterion count, as in "
                f"{words().criterion} which sees the whole batch. A constant is to be a plain number."
            )
    elif value.reduction == "sum" or (value.reduction is None and by in value.counts and not value.shape):
        warn(
            f"a sum is {'divided' if divides else 'multiplied'} by {by} before {words().step}{_here()}\n"
            f"If that counts this rank's samples: the sum is that of the whole batch, {parts} times as many. "
            "Take the mean, or let the criterion count."
        )


def note_reduction(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Mark the result of an operator inside the model or the criterion if it is a sum or a mean without dimensions.

    Args:
        operator: the operator, below autograd.
        args: its arguments.
        kwargs: its keyword arguments.
        result: its result.
    """
    first = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(first, Tensor) or first.dim():
        return
    name, arguments = operator.overloadpacket.__name__, [*args, *kwargs.values()]
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    reduction: Reduction = None
    if any(tensor.dim() for tensor in tensors):
        names = [argument.name for argument in operator._schema.arguments]
        options = dict(zip(names, args, strict=False)) | dict(kwargs)
        if "reduction" in names:
            # The enumeration of torch.nn.functional.
            reduction = {1: "mean", 2: "sum"}.get(options.get("reduction", 1))  # type: ignore[assignment]
        else:
            reduction = "sum" if name in _SUMS else "mean" if name == "mean" else None
    else:
        marks = [reduction_of(tensor) for tensor in tensors]
        if name == "div" and marks[0] == "sum":
            # By a number it may be either.
            reduction = "mean" if marks[1:] == ["sum"] else None
        elif name in (*_MULTIPLIES, *_KEEPS, "div", "_to_copy", "alias", "where", "clamp", "clamp_min"):
            # A sum beside a mean may be a sum over something else, as in losses that balance experts.
            kinds = set(marks) - {None}
            reduction = kinds.pop() if len(kinds) == 1 else None
    first._zerograph_reduction = reduction  # type: ignore[attr-defined]


def reduction_of(tensor: Tensor) -> Reduction:
    """Return how :func:`note_reduction` has marked a tensor."""
    reduction: Reduction = getattr(tensor, "_zerograph_reduction", None)
    return reduction


def _reduces(function: Callable[..., Any], name: str, arguments: Sequence[Any], *, opaque: bool) -> Reduction:
    """Classify a call that takes the batch and returns a tensor without a batch dimension."""
    if opaque:
        reduction = getattr(function, "reduction", None)
        return reduction if reduction in ("sum", "mean") else None
    if name in _SUMS or any(isinstance(argument, str) and argument == "sum" for argument in arguments):
        return "sum"
    return "mean" if name in ("mean", "nanmean") or getattr(function, "__module__", None) == F.__name__ else None


def _counts(meta: Meta) -> frozenset[int]:
    """Return the possible counts of this rank's samples that a tensor was computed from."""
    if meta.batch_dim is None:
        return meta.counts
    return frozenset({meta.shape[meta.batch_dim], math.prod(meta.shape)})


def _factor(name: str, arguments: Sequence[Any]) -> Any:
    """Return the divisor or factor of a recorded tensor if it may be a count or its inverse, else None."""
    if name not in (*_DIVIDES, *_MULTIPLIES) or len(arguments) < 2:
        return None
    pair = list(arguments[:2])
    recorded = [isinstance(operand, Operand) and not operand.real for operand in pair]
    if sum(recorded) != 1 or (name in _DIVIDES and not recorded[0]):
        return None
    by = pair[recorded.index(False)]
    if isinstance(by, Operand):
        return by if not by.meta.shape and not by.number else None
    if isinstance(by, bool) or not isinstance(by, (int, float)):
        return None
    times = by if name in _DIVIDES else 1 / by if isinstance(by, float) and by else 0
    return by if times > 1 and abs(times - round(times)) < 1e-6 * times else None


def _here() -> str:
    line, code = source.running_line()
    return f"\n  {line}   {code}"
