"""OneFlow's gradient accumulation: the mean of the micro-batches' gradients, also for a loss that is a sum.

A graph computes with the whole batch. If the loss is a mean over the batch, its gradient is the mean of the k
micro-batches' gradients. If it is a sum over the batch, OneFlow's gradient is 1/k of the gradient of the sum, so
``backward()`` starts from 1/k. To tell the two apart, each tensor in ``build()`` gets a power of the batch size: 1 for
a sum over the batch and for the batch size itself, 0 for a mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base.source import running_line
from zerograph.errors import CaptureError


@dataclass(frozen=True)
class _Growth:
    """How a tensor depends on the batch.

    Attributes:
        rows: one of its dimensions is the batch's.
        power: the power of the batch size with which its elements grow.
        where: the line of the sum, for messages.
        mixed: the line that adds a sum over the batch to another value, if there is one; else empty.
    """

    rows: bool = False
    power: int = 0
    where: str = ""
    mixed: str = ""


_CONSTANT = _Growth()
_REDUCTIONS = ("mean", "sum", "none", "batchmean")
_LOSSES = {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
}
_SUMS, _MEANS = {"sum", "nansum", "dot", "vdot", "inner"}, {"mean", "nanmean"}
_TIMES, _OVER = {"mul", "multiply"}, {"div", "divide", "true_divide"}
_TERMS = {"add", "sub", "subtract", "stack", "cat", "concat", "where", "lerp"}
_SAME = {
    "abs", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "expand", "flatten", "float", "half",
    "neg", "permute", "relu", "reshape", "select", "squeeze", "to", "transpose", "type", "type_as", "unsqueeze", "view",
}  # fmt: skip
_NUMBERS = {"tensor", "as_tensor", "scalar_tensor", "full"}


@contextlib.contextmanager
def of_micro_batches(count: int, inputs: Any) -> Iterator[None]:
    """Make ``backward()`` of a loss that grows with the batch give the mean of the micro-batches' gradients.

    Args:
        count: number of micro-batches.
        inputs: arguments of ``build()``.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if count == 1 or not tensors:
        yield
        return
    watch = _Watch(tensors)

    def run(original: Callable[..., None], roots: Any, *args: Any, **kwargs: Any) -> None:
        if _torch.backward_sequence_number() is None:
            single = isinstance(roots, Tensor)
            divided = [_divided(root, watch.of(root), count) for root in ([roots] if single else roots)]
            roots = divided[0] if single else divided
        original(roots, *args, **kwargs)

    with _torch.replaced_backward(run), watch:
        yield


def _divided(root: Tensor, growth: _Growth, count: int) -> Tensor:
    if growth.mixed:
        raise CaptureError(
            f"build() adds a sum over the batch to a value that is no sum\n  {growth.mixed}\n"
            f"The sum is computed at {growth.where or 'a line unknown'}. With set_gradient_accumulation_steps() "
            "OneFlow's gradient is the mean of the micro-batches' gradients: 1/k of that of a sum, but all of that "
            "of a mean. Call backward() for each term, or divide the sum by the batch size."
        )
    return root / count if growth.power == 1 else root


class _Watch(TorchFunctionMode):
    """Follow how each tensor grows with the batch."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        # Symbolic sizes count by the value that the step is traced with, which is a multiple of a prime of their own.
        self._sizes = {_torch.size_hint(tensor.shape[0]) for tensor in inputs} - {0, 1}
        # The tensors are stored too, so that their ids are not reused.
        self._known: dict[int, tuple[Tensor, _Growth]] = {id(tensor): (tensor, _Growth(rows=True)) for tensor in inputs}

    def of(self, value: Any) -> _Growth:
        """Return the growth of a tensor or number."""
        if isinstance(value, Tensor):
            entry = self._known.get(id(value))
            # The result of a user's autograd function is assumed to have a batch dimension.
            return entry[1] if entry else _Growth(rows=value.requires_grad and not value.is_leaf and value.dim() > 0)
        return _Growth(power=1) if self._counts(value) else _CONSTANT

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        # Computed before the call, because an in-place operator changes the growth of its argument.
        growth = None if name in ("get", "set", "backward") else self._after(name, args, kwargs)
        earlier = next(
            (other for leaf in pytree.tree_leaves((args, kwargs)) if (other := self.of(leaf)).mixed),
            None,
        )
        if growth is not None and earlier is not None:
            growth = replace(growth, where=earlier.where, mixed=earlier.mixed)
        result = func(*args, **kwargs)
        if growth is not None:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._known[id(leaf)] = leaf, replace(growth, rows=growth.rows and leaf.dim() > 0)
        return result

    def _after(self, name: str, args: Any, kwargs: Any) -> _Growth:
        name = {"truediv": "div", "rtruediv": "rdiv", "rsub": "sub"}.get(name, name)
        plain = name.removeprefix("i") if name in ("iadd", "isub", "imul", "idiv", "itruediv") else name
        plain = {"truediv": "div", "radd": "add", "rmul": "mul"}.get(plain, plain)
        growths = [self.of(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        rows = any(one.rows for one in growths)
        if plain in _LOSSES:
            return self._loss(args, kwargs, rows)
        if plain in _NUMBERS and args and self._counts(args[-1]):
            return _Growth(power=1)
        if not growths:
            return _CONSTANT
        first = growths[0]
        if plain in _SUMS | _MEANS:
            whole = rows and self._reduces_batch(args, kwargs)
            grows = whole and plain in _SUMS
            line = running_line()[0] if grows else first.where
            return _Growth(rows and not whole, first.power + grows, line)
        if plain in _TIMES and len(args) == 2:
            first_growth, power = self.of(args[0]), self._factor(args[1])
            return _Growth(rows, first_growth.power + power, first_growth.where)
        if plain in (*_OVER, "rdiv") and len(args) == 2:
            over, under = (args[1], args[0]) if plain == "rdiv" else args
            return self._quotient(over, under, rows)
        if plain in _TERMS:
            return self._terms(args, kwargs, rows)
        return _Growth(rows, first.power if plain in _SAME else 0, first.where)

    def _loss(self, args: Any, kwargs: Any, rows: bool) -> _Growth:
        reductions = [one for one in (*args, *kwargs.values()) if isinstance(one, str) and one in _REDUCTIONS]
        reduction = reductions[0] if reductions else "mean"
        if not rows or reduction == "none":
            return _Growth(rows)
        return _Growth(power=1, where=running_line()[0]) if reduction == "sum" else _CONSTANT

    def _quotient(self, over: Any, under: Any, rows: bool) -> _Growth:
        growth = self.of(over)
        if isinstance(under, Tensor):
            return _Growth(rows, growth.power - self.of(under).power, growth.where)
        # A mean over 16 rows that is divided by 16 is not divided by the batch size: only rows and sums are.
        counted = self._counts(under) and (rows or growth.power > 0)
        return _Growth(rows, growth.power - counted, growth.where)

    def _factor(self, value: Any) -> int:
        if isinstance(value, Tensor):
            return self.of(value).power
        value = _number(value)
        return -1 if isinstance(value, float) and value and self._counts(1 / value) else 0

    def _terms(self, args: Any, kwargs: Any, rows: bool) -> _Growth:
        terms = [self.of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        powers = {term.power for term in terms}
        if len(powers) > 1 and not rows and 1 in powers:
            line, code = running_line()
            grows = next(term.where for term in terms if term.power == 1)
            return _Growth(power=1, where=grows, mixed=f"{line}   {code}")
        return _Growth(rows, max(powers, key=abs, default=0), next((term.where for term in terms if term.where), ""))

    def _reduces_batch(self, args: Any, kwargs: Any) -> bool:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dims is None or isinstance(dims, (Tensor, torch.dtype)):
            return True
        x: Tensor = args[0]
        chosen = [dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)]
        # The first dimension that is as long as the batch is taken as the batch dimension; else dimension 0.
        batch = next((n for n, size in enumerate(x.shape) if _torch.size_hint(size) in self._sizes), 0)
        return batch in chosen or not chosen

    def _counts(self, value: Any) -> bool:
        """Return whether a number is a multiple of the batch size."""
        value = _number(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 < value < 2**62:
            return False
        whole = round(value)
        return abs(value - whole) < 1e-6 * value and any(whole % size == 0 for size in self._sizes)


def _number(value: Any) -> Any:
    """Return the value that a symbolic number is traced with, and anything else itself."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
