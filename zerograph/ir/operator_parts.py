"""Elementwise operators written as their products, quotients and sums, each of which rounds once.

The parts take 0-d tensors where the overloads of the operators take numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import in_place_overload

aten = torch.ops.aten


def is_number(node: fx.Node) -> bool:
    """Return whether a node reads the value of a 0-d tensor, such as a learning rate, as a number."""
    return node.target is aten._local_scalar_dense.default


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    return start + (end - start) * weight


def _add_product(x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    return x + _times(first, value) * second


def _add_quotient(x: Any, first: Any, second: Any, value: Any = 1) -> Any:
    return x + _quotient(_times(first, value), second)


def _quotient(x: Any, y: Any) -> Any:
    # A product by the reciprocal of one number takes less time than a quotient of each element.
    return x * torch.reciprocal(y) if isinstance(y, Tensor) and y.dim() == 0 else torch.div(x, y)


def _add(x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return torch.add(x, _times(y, alpha))


def _subtract(x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(x, _times(y, alpha))


def _times(x: Any, factor: Any) -> Any:
    return x if isinstance(factor, (int, float)) and factor == 1 else x * factor


def _written(part: Callable[..., Any]) -> Callable[..., Tensor]:
    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(part(x, *args, **kwargs))

    return write


# Operators by their parts. The overloads for numbers get 0-d tensors too.
PARTS: dict[Any, Callable[..., Any]] = {
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.addcmul.default: _add_product,
    aten.addcdiv.default: _add_quotient,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _subtract,
    aten.sub.Scalar: _subtract,
    aten.mul.Tensor: torch.mul,
    aten.mul.Scalar: torch.mul,
    aten.div.Tensor: _quotient,
    aten.div.Scalar: _quotient,
    aten.square.default: lambda x: x * x,
}
PARTS |= {
    in_place: _written(part)
    for operator, part in PARTS.items()
    if (in_place := in_place_overload(operator)) is not None
}


def writes_one_each(x: Tensor, dim: int, index: Tensor) -> bool:
    """Return whether a scatter writes one element of each row along a dimension, which may count from the end."""
    shape = list(x.shape)
    if not shape or isinstance(index.shape[dim], torch.SymInt):
        return False
    shape[dim] = 1
    return len(index.shape) == len(shape) and all(own == one for own, one in zip(index.shape, shape, strict=True))


def _scatter(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    if not writes_one_each(x, dim, index) or (isinstance(value, Tensor) and value.dim() and value.shape != index.shape):
        return torch.scatter(x, dim, index, value)
    dim %= x.dim()
    places = torch.arange(x.shape[dim], device=x.device).view(*(-1 if at == dim else 1 for at in range(x.dim())))
    return torch.where(places == index, value, x).to(x.dtype)


# Scatters written as a choice for each element: loops that read it compute it, and it is never in memory.
SCATTERS: dict[Any, Callable[..., Any]] = {aten.scatter.src: _scatter, aten.scatter.value: _scatter}


# Operators that Inductor turns into loops, beside pointwise ones: a loop reads several elements for each result, or
# writes to other memory.
LOOPS_OF_SEVERAL = {
    aten.amax.default,
    aten.amin.default,
    aten.copy_.default,
    aten.gather.default,
    aten.linalg_vector_norm.default,
    aten.mean.default,
    aten.mean.dim,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var_mean.correction,
}
