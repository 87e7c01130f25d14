"""Let an optimizer's Python code compute with values of tensors while its update is traced."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.base.contexts import replaced


class ValuesAsTensors(TorchFunctionMode):
    """Let ``tensor.item()`` return a 0-d fp64 tensor, as exact as the Python number.

    ``max`` and ``min`` take such tensors, so optimizers that compute with values (Adafactor, Adagrad) are traced.

    Also record the line of the optimizer that calls each operator. While ``watching``, record in ``asks_sizes`` whether
    a call on a tensor with dimensions returns anything but tensors: if not, no Python code can depend on a size.

    Args:
        answers: the first answers to ``bool(tensor)``; later ones are False.
        keeps_lists: leave functions of lists of tensors as they are.

    Attributes:
        asked: the tensors whose truth was asked for.
    """

    def __init__(self, answers: Sequence[bool] = (), *, keeps_lists: bool = False) -> None:
        super().__init__()
        self._keeps_lists = keeps_lists
        self.watching = self.asks_sizes = False
        self.answers, self.asked = answers, list[Tensor]()

    def __enter__(self) -> Any:
        self._replaced = replaced(
            [
                *((math, name, _of_tensor(getattr(math, name), getattr(torch, name))) for name in _OF_MATH),
                (builtins, "max", _with_tensors(builtins.max, torch.maximum, torch.clamp_min)),
                (builtins, "min", _with_tensors(builtins.min, torch.minimum, torch.clamp_max)),
            ]
        )
        self._replaced.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._replaced.__exit__(None, None, None)
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._computed(func, args, kwargs or {})
        if isinstance(result, Tensor) and not result.dim():
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if tensors and all(map(is_number, tensors)):
                number(result)
        if self.watching and not self.asks_sizes and _what(func) not in _OF_ANY_SIZE:
            self.asks_sizes = any(
                not isinstance(leaf, Tensor) and leaf is not None for leaf in pytree.tree_leaves(result)
            ) and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in pytree.tree_leaves((args, kwargs)))
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == _SET_DATA and args[0].shape == args[1].shape and args[0].dtype is args[1].dtype:
            # The graph writes to the parameter's memory.
            return args[0].detach().copy_(args[1].detach())
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if name.startswith("_foreach_") and not self._keeps_lists:
            return self._each(name.removeprefix("_foreach_"), args, kwargs)
        with _torch.annotated({"line": source.running_line(optimizers=True)[0]}):
            if is_number(args[0] if args else None) and func in _IN_PLACE:
                # ``rate *= 2`` binds a name to another number, and changes none.
                func = _IN_PLACE[func]
            if func is Tensor.__bool__ and args[0].numel() == 1:
                self.asked.append(args[0].clone())
                return len(self.asked) <= len(self.answers) and self.answers[len(self.asked) - 1]
            if func is Tensor.item:
                return number(args[0].detach().reshape(()).to(torch.float64, copy=True))
            if func in _SUBS and isinstance((kwargs or {}).get("alpha", 1), (Tensor, torch.SymFloat)):
                # Torch asks whether alpha is 1.
                return _SUBS[func](*args, **{**kwargs, "alpha": -kwargs["alpha"]})
            if func in _LERPS and len(args) == 3 and isinstance(args[2], Tensor):
                end, weight = args[1], args[2]
                # The plain optimizer passes a number to lerp, for any dtype.
                if weight.dim() == 0 and weight.dtype is not end.dtype:
                    return func(args[0], end, weight.item())
            return func(*args, **kwargs)

    def _each(self, name: str, args: Any, kwargs: Any) -> Any:
        """Compute a function of lists of tensors for each of their tensors, which does not read the others."""
        if name in _WITH_VALUE and len(args) == 4:
            args, kwargs = args[:3], {"value": args[3]}
        function = torch.linalg.vector_norm if name == "norm" else getattr(torch, name, None) or getattr(Tensor, name)
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        results = [
            self._computed(
                function,
                tuple(value[at] if isinstance(value, (list, tuple)) else value for value in args),
                {key: value[at] if isinstance(value, (list, tuple)) else value for key, value in kwargs.items()},
            )
            for at in range(len(lists[0]))
        ]
        return None if name.endswith("_") else tuple(results)


def number(tensor: Tensor) -> Tensor:
    """Mark a 0-d tensor as one that stands for a Python number, and return it."""
    tensor.is_python_number = True  # type: ignore[attr-defined]
    return tensor


def is_number(value: Any) -> bool:
    """Return True for a tensor that stands for a Python number: an in-place operator does not change it."""
    return isinstance(value, Tensor) and hasattr(value, "is_python_number")


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE: dict[Any, Any] = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow")
}
_WITH_VALUE = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")
# Functions of step counts.
_OF_MATH = ("sqrt", "exp", "log", "cos", "sin", "tanh", "floor", "ceil", "pow")


def _of_tensor(function: Callable[..., Any], of_tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function of ``math`` that also takes 0-d tensors."""

    def applied(*values: Any) -> Any:
        return of_tensors(*values) if any(isinstance(value, Tensor) for value in values) else function(*values)

    return applied


def _what(func: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


# Properties of tensors that do not depend on their size.
_OF_ANY_SIZE = {
    *("device", "dtype", "layout", "requires_grad", "is_complex", "is_floating_point"),
    *("is_cpu", "is_cuda", "is_meta", "is_sparse"),
}


_SUBS: dict[Any, Any] = {
    **dict.fromkeys((Tensor.sub, Tensor.subtract), Tensor.add),
    **dict.fromkeys((Tensor.sub_, Tensor.subtract_), Tensor.add_),
    **dict.fromkeys((torch.sub, torch.subtract), torch.add),
}
_LERPS = (Tensor.lerp, Tensor.lerp_, torch.lerp)


def _with_tensors(
    builtin: Callable[..., Any], of_tensors: Callable[..., Tensor], of_number: Callable[..., Tensor]
) -> Callable[..., Any]:
    """Return ``max`` or ``min`` that also takes 0-d tensors among its numbers."""

    def extreme(*values: Any, **kwargs: Any) -> Any:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(values) < 2 or kwargs or not tensors:
            return builtin(*values, **kwargs)
        numbers = [value for value in values if not isinstance(value, Tensor)]
        extreme_tensor = functools.reduce(of_tensors, tensors)
        return of_number(extreme_tensor, builtin(numbers)) if numbers else extreme_tensor

    return extreme
