"""Fake results of operators with symbolic sizes, computed once for equal calls.

Torch's own cache of fake results makes the sizes of each cached result anew, which takes longer than to compute the
result. This cache keeps the ``SymInt`` objects of the first result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


@dataclass(frozen=True)
class _Result:
    """A fake tensor without its storage.

    Attributes:
        base: position among the tensors of the call of the one whose storage the result shares; None for its own.
    """

    base: int | None
    shape: Sequence[Any]
    strides: Sequence[Any]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    def make(self, mode: FakeTensorMode, tensors: Sequence[Tensor]) -> FakeTensor:
        """Return a fake tensor like the result of the first call."""
        assert mode.shape_env is not None
        # The first call has recorded the conditions on sizes.
        with in_kernel_invocation_manager(mode), mode.shape_env.suppress_guards():
            if self.base is None:
                elem = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
            else:
                elem = torch.as_strided(tensors[self.base], self.shape, self.strides, self.offset)
        return FakeTensor(mode, elem, self.device)


class _NotCachedError(Exception):
    """A call or its result has something that the cache does not describe."""


@dataclass
class SymbolicResults:
    """Results of calls by operator and arguments, for one fake mode."""

    _results: dict[Hashable, _Result | tuple[_Result, ...]] = field(default_factory=dict)

    def call(
        self,
        mode: FakeTensorMode,
        compute: Callable[[], Any],
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the fake result of ``func(*args, **kwargs)`` in the mode, which ``compute()`` computes."""
        if not _is_described_by_arguments(func) or torch.is_inference_mode_enabled():
            return compute()
        tensors: list[Tensor] = []
        try:
            # Integers become the default dtype where an operator divides them.
            key = (func, torch.get_default_dtype(), _described(mode, (args, tuple(kwargs.items())), tensors))
        except _NotCachedError:
            return compute()
        found = self._results.get(key)
        if found is None:
            result = compute()
            try:
                several = isinstance(result, tuple)
                found = (
                    tuple([_kept(mode, part, tensors) for part in result]) if several else _kept(mode, result, tensors)
                )
            except _NotCachedError:
                return result
            self._results[key] = found
            return result
        if isinstance(found, tuple):
            return tuple([part.make(mode, tensors) for part in found])
        return found.make(mode, tensors)


def _described(mode: FakeTensorMode, argument: Any, tensors: list[Tensor]) -> Hashable:
    """Return all that a result depends on; add the tensors of the argument to the list."""
    if isinstance(argument, (list, tuple)):
        return tuple([_described(mode, entry, tensors) for entry in argument])
    if isinstance(argument, Tensor):
        _check(mode, argument)
        tensors.append(argument)
        strides, offset = argument.stride(), argument.storage_offset()
        sizes = tuple([_expression(size) for size in (*argument.shape, *strides, offset)])
        return (sizes, argument.dtype, argument.fake_device)  # type: ignore[attr-defined]
    if isinstance(argument, torch.SymInt):
        return torch.SymInt, argument.node._expr
    if isinstance(argument, _CONSTANTS):
        # 1, 1.0 and True are equal and promote differently.
        return type(argument), argument
    raise _NotCachedError


def _kept(mode: FakeTensorMode, result: Any, tensors: Sequence[Tensor]) -> _Result:
    _check(mode, result)
    storage = result.untyped_storage()._cdata
    base = next((n for n, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage), None)
    offset = result.storage_offset()
    if any(result is tensor for tensor in tensors) or (offset if base is None else tensors[base].dtype != result.dtype):
        raise _NotCachedError
    return _Result(base, result.shape, result.stride(), offset, result.dtype, result.fake_device)


def _check(mode: FakeTensorMode, tensor: Any) -> None:
    """Raise if a value is not a fake tensor of the mode, or has more to it than :class:`_Result` says."""
    plain = type(tensor) is FakeTensor and tensor.fake_mode is mode and tensor.layout is torch.strided
    if not plain or tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
        raise _NotCachedError


_CONSTANTS = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


@functools.cache
def _is_described_by_arguments(func: Any) -> bool:
    """Return True for operators of torch whose result depends on no values and that write to no argument."""
    ours = isinstance(func, torch._ops.OpOverload) and func.namespace in ("aten", "prims")
    return ours and not func._schema.is_mutable and _TAGS.isdisjoint(func.tags)


def _expression(size: Any) -> Hashable:
    """Return what equal sizes have in common. What the environment has learned of a symbol since is not applied."""
    return size if isinstance(size, int) else size.node._expr
