"""Fake results of operators, computed once for equal calls.

This cache replaces torch's, which describes calls in more detail and makes symbolic sizes of cached results anew: that
takes longer than to compute the result. Here results keep the ``SymInt`` objects of the first one.
"""

from __future__ import annotations

import contextlib
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
        if self.base is None:
            return empty_fake(mode, self.shape, self.strides, self.dtype, self.device)
        with in_kernel_invocation_manager(mode), _conditions_known(mode, (*self.shape, *self.strides, self.offset)):
            elem = torch.as_strided(tensors[self.base], self.shape, self.strides, self.offset)
        return FakeTensor(mode, elem, self.device)


def empty_fake(
    mode: FakeTensorMode, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """Return a fake tensor with a storage of its own, without the way through the dispatcher and the modes."""
    with in_kernel_invocation_manager(mode), _conditions_known(mode, (*shape, *strides)):
        elem = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, elem, device)


def _conditions_known(mode: FakeTensorMode, sizes: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Record no conditions on symbolic sizes: the first call has recorded them."""
    if all(isinstance(size, int) for size in sizes):
        return _NOTHING
    assert mode.shape_env is not None
    return mode.shape_env.suppress_guards()


_NOTHING = contextlib.nullcontext()


class _NotCachedError(Exception):
    """A call or its result has something that the cache does not describe."""


_Results = dict[Hashable, _Result | tuple[_Result, ...]]

# Results without symbolic sizes, for all modes. Of some hundred bytes each; a full cache is cleared.
_STATIC: _Results = {}

_MOST_RESULTS = 1 << 16


@dataclass
class FakeResults:
    """Results of calls by operator and arguments, for one fake mode."""

    _symbolic: _Results = field(default_factory=dict)

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
        call = _Call(mode)
        try:
            # Integers become the default dtype where an operator divides them.
            key = func, torch.get_default_dtype(), call.described(args), call.described(tuple(kwargs.items()))
        except _NotCachedError:
            return compute()
        results = self._symbolic if call.symbolic else _STATIC
        found = results.get(key)
        if found is None:
            result = compute()
            with contextlib.suppress(_NotCachedError):
                if len(results) >= _MOST_RESULTS:
                    results.clear()
                several = isinstance(result, tuple)
                results[key] = tuple(map(call.kept, result)) if several else call.kept(result)
            return result
        if isinstance(found, tuple):
            return tuple([part.make(mode, call.tensors) for part in found])
        return found.make(mode, call.tensors)


@dataclass
class _Call:
    """A call of an operator.

    Attributes:
        mode: the fake mode of its tensors.
        tensors: those among its arguments.
        symbolic: some argument has a symbolic size, or is one.
    """

    mode: FakeTensorMode
    tensors: list[Tensor] = field(default_factory=list)
    symbolic: bool = False

    def described(self, argument: Any) -> Hashable:
        """Return all of an argument that a result depends on."""
        if isinstance(argument, (list, tuple)):
            return tuple([self.described(entry) for entry in argument])
        if isinstance(argument, Tensor):
            self._check(argument)
            self.tensors.append(argument)
            sizes = [*argument.shape, *argument.stride(), argument.storage_offset()]
            if argument._has_symbolic_sizes_strides:
                self.symbolic = True
                sizes = [_expression(size) for size in sizes]
            return (*sizes, argument.dtype, argument.fake_device)  # type: ignore[attr-defined]
        if isinstance(argument, torch.SymInt):
            self.symbolic = True
            return torch.SymInt, _expression(argument)
        if isinstance(argument, _CONSTANTS):
            # 1, 1.0 and True are equal and promote differently.
            return type(argument), argument
        raise _NotCachedError

    def kept(self, result: Any) -> _Result:
        """Return what to keep of a result."""
        self._check(result)
        storage, offset = result.untyped_storage()._cdata, result.storage_offset()
        base = next((n for n, tensor in enumerate(self.tensors) if tensor.untyped_storage()._cdata == storage), None)
        same = any(result is tensor for tensor in self.tensors)
        if same or (_expression(offset) != 0 if base is None else self.tensors[base].dtype != result.dtype):
            raise _NotCachedError
        if result._has_symbolic_sizes_strides and not self.symbolic:
            raise _NotCachedError
        return _Result(base, result.shape, result.stride(), offset, result.dtype, result.fake_device)

    def _check(self, tensor: Any) -> None:
        """Raise if a value is not a fake tensor of the mode, or has more to it than :class:`_Result` says."""
        plain = type(tensor) is FakeTensor and tensor.fake_mode is self.mode and tensor.layout is torch.strided
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
