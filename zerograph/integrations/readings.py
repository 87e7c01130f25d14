"""Values that a recorded function reads, and what it does with them: metrics, counters, logs.

A trainer's ``compute_loss`` may call ``loss.item()`` and append the number to a list. It is traced once, when no value
exists. While it is traced a read returns a stand-in, and the tensor that is read becomes an output of the graph. After
the step the function runs once more, for its Python alone: operators return what they returned while tracing, without
computing anything, and reads return the values. Both runs must call the same operators with the same numbers: a
function in which a value decides what is computed is an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Number
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.capture.selected import is_mask_of, selected
from zerograph.errors import CaptureError
from zerograph.graph import building
from zerograph.integrations.checks import is_checked
from zerograph.loops.deferred import replaying

_running: ContextVar[bool] = ContextVar("running", default=False)


def sees_whole_batch() -> bool:
    """Return whether a recorded function runs, whose tensors are those of all ranks already."""
    return _running.get()


@dataclass(frozen=True)
class _Call:
    """A call of an operator or a module while the function was traced.

    Attributes:
        key: the callee and its arguments, with numbers for tensors.
        tree: how the results are nested.
        leaves: the results, with :class:`_Number` for tensors.
        read: the number of the value that it reads, or None.
        line: the user's line.
    """

    key: tuple[Any, ...]
    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    read: int | None
    line: tuple[str, str]


@dataclass(frozen=True)
class _Number:
    """Tensor number ``number`` of a log."""

    number: int


@dataclass(eq=False)
class Log:
    """The calls of one trace, in order.

    Attributes:
        calls: the calls.
        metas: shape, dtype and device of each tensor, by its number.
        results: the numbers of the tensors that the function returned.
        reads: number of values that it reads.
        changes: it changes attributes of its object.
        counts_samples: it uses a size that depends on the number of samples.
    """

    calls: list[_Call] = field(default_factory=list)
    metas: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)
    reads: int = 0
    changes: bool = False
    counts_samples: bool = False


class Readings:
    """The logs of a method that is recorded as one call.

    Args:
        method: the method. While it is traced it gets a copy of its object, which takes what the method changes.
        substituted: a context in which the method is traced.
    """

    def __init__(self, method: Callable[..., Any], substituted: Callable[[], Any] = contextlib.nullcontext) -> None:
        self._method, self._substituted = method, substituted
        self._logs: dict[Hashable, Log] = {}

    def traced(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        """Call the method on tensors without values.

        Args:
            training: the mode of its model, on which logs depend.
            args: the arguments of the method.
            kwargs: its keyword arguments.

        Returns:
            The result, and the tensors whose values the method reads.

        Raises:
            CaptureError: what the method computes depends on a value that it reads, or a tensor is kept.
        """
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # The logs of a step are made before it is built, from sizes that are numbers.
        log = None if building() else Log()
        trace = _Trace(log, inputs)
        owner, call = self._copied()
        before = _outline(vars(owner)) if owner is not None else {}
        with self._substituted(), _whole_batch(), _modules_by(trace.call_module), trace:
            result = _called(call, args, kwargs)
        if log is None:
            return result, trace.reads
        if owner is not None:
            self._check_kept(owner, before, trace)
            log.changes = _outline(vars(owner)) != before
        log.results = [trace.number(leaf) for leaf in pytree.tree_leaves(result)]
        if log.reads:
            self._check_paths(log, args, kwargs)
        self._logs[_key_of(training, args, kwargs)] = log
        return result, trace.reads

    def log_of(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> Log | None:
        """Return the log of the batch of which these arguments are one of ``parts`` parts, if it must be repeated."""
        own, whole = (self._logs.get(_key_of(training, args, kwargs, times)) for times in (1, parts))
        log = whole if whole is not None else own
        if log is None or not (log.reads or log.changes):
            return None
        if own is not None and own is not log and _sizes(own) != _sizes(log):
            log.counts_samples = True
        return log

    def repeat(self, log: Log, args: tuple[Any, ...], kwargs: dict[str, Any], values: Sequence[Tensor]) -> None:
        """Run the method once more, with the values that it reads.

        Args:
            log: the log of its trace.
            args: its arguments; tensors stand for those of the trace.
            kwargs: its keyword arguments.
            values: the values of the tensors that it reads.

        Raises:
            CaptureError: it calls other operators, because of a value that it has read.
        """
        _repeat(log, self._method, args, kwargs, values)

    def _copied(self) -> tuple[Any, Callable[..., Any]]:
        owner = getattr(self._method, "__self__", None)
        if owner is None:
            return None, self._method
        other = copy.copy(owner)
        for name, value in vars(owner).items():
            vars(other)[name] = _copied(value)
        return other, self._method.__func__.__get__(other)  # type: ignore[attr-defined]

    def _check_kept(self, owner: Any, before: Mapping[str, Any], trace: _Trace) -> None:
        after = _outline(vars(owner))
        for name, value in vars(owner).items():
            if before.get(name) == after[name]:
                continue
            if any(isinstance(leaf, Tensor) and trace.number(leaf) is not None for leaf in pytree.tree_leaves(value)):
                raise CaptureError(
                    f"{self._method.__name__}() keeps a tensor in self.{name}, which has no value before the step\n"
                    "Keep a number, such as loss.item(), or return outputs and look at them in a callback."
                )

    def _check_paths(self, log: Log, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if other values would lead to other operators."""
        for guess in _GUESSES:
            _, call = self._copied()
            values = _Guesses(log, guess)
            try:
                with self._substituted():
                    _repeat(log, call, args, kwargs, values)
            except _PathError:
                raise
            except _OWN_ERRORS:
                # The method's own, about values that do not occur.
                continue


@dataclass
class _Guesses:
    """Values for every read that are all the same number."""

    log: Log
    guess: float

    def __getitem__(self, read: int) -> Tensor:
        number = next(leaf.number for call in self.log.calls if call.read == read for leaf in _tensors_of(call.key))
        shape, dtype, _ = self.log.metas[number]
        return _guessed(shape, dtype, self.guess)


# Stand-ins for values: the trace uses the first, and others must lead to the same operators.
_FIRST_GUESS, *_GUESSES = 1.0, 0.0, -1e6, 1e6
_OWN_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Trace(TorchFunctionMode):
    """Collect the tensors that are read, and log all calls of operators."""

    def __init__(self, log: Log | None, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.reads: list[Tensor] = []
        self._log, self._in_module = log, False
        # Tensors stay referenced, so that no other tensor gets their id.
        self._numbers: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        for tensor in inputs:
            self._numbered(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_module:
            return False if func is Tensor.__bool__ and is_checked() else func(*args, **kwargs)
        if func in _READS:
            tensor = args[0]
            self.reads.append(tensor.detach().clone())
            sizes = [_torch.size_hint(size) for size in tensor.shape]
            result: Any = _read(func, _guessed(sizes, tensor.dtype, _FIRST_GUESS), args, kwargs)
            self._note(func, args, kwargs, result, read=len(self.reads) - 1)
            return result
        if func is Tensor.__getitem__ and is_mask_of(*args):
            result = selected(*args)
        elif func in (torch.chunk, Tensor.chunk):
            result = _chunked(func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def call_module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module; what happens inside it is no part of the log."""
        if self._in_module:
            return call(module, *args, **kwargs)
        self._in_module = True
        try:
            result = call(module, *args, **kwargs)
            self._note(module, args, kwargs, result)
        finally:
            self._in_module = False
        return result

    def number(self, leaf: Any) -> int | None:
        """Return the number of a tensor of the trace."""
        return self._numbers.get(id(leaf))

    def _note(self, callee: Any, args: Any, kwargs: Any, result: Any, read: int | None = None) -> None:
        if self._log is None:
            return
        arguments = pytree.tree_leaves((args, kwargs))
        leaves, tree = pytree.tree_flatten(result)
        if read is None and not any(isinstance(leaf, Tensor) for leaf in (*arguments, *leaves)):
            return
        key = _key(callee, args, kwargs, self.number)
        shown = tuple(_Number(self._numbered(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._log.calls.append(_Call(key, tree, shown, read, source.running_line()))
        self._log.reads = len(self.reads)

    def _numbered(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            if self._log is not None:
                with _torch.without_torch_function():  # of a selection by a mask
                    self._log.metas.append((tuple(tensor.shape), tensor.dtype, tensor.device))
        return self._numbers[id(tensor)]


def _chunked(chunk: Callable[..., Any], input: Tensor, chunks: int, dim: int = 0) -> Any:
    """Cut the rows of a batch into equal parts, such as chosen and rejected texts, whatever their number is."""
    rows = input.shape[0]
    if dim % input.dim():
        return chunk(input, chunks, dim)
    if isinstance(rows, int):
        if rows % chunks:
            line, code = source.running_line()
            raise CaptureError(
                f"chunk() cuts {rows} rows into {chunks} parts\n  {line}   {code}\n"
                f"They would be unequal. Let the collator return {chunks} rows for each sample."
            )
        return chunk(input, chunks, dim)
    each = rows // chunks
    return tuple(input.narrow(0, each * number, each) for number in range(chunks))


class _StandIn(Tensor):
    """A tensor of a log, without data."""

    number: int

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CaptureError(f"{func} needs the data of a tensor that has been computed in the step already")


class _Repeat(TorchFunctionMode):
    """Return what a log's calls returned; reads return values."""

    def __init__(self, log: Log, values: Any) -> None:
        super().__init__()
        self._log, self._values, self._at = log, values, 0
        self._stand_ins: dict[int, _StandIn] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._call(func, args, kwargs, lambda: func(*args, **kwargs))

    def call_module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what the module returned."""
        return self._call(module, args, kwargs, lambda: call(module, *args, **kwargs))

    def stand_in(self, number: int) -> Tensor:
        """Return the tensor of a number."""
        if number not in self._stand_ins:
            shape, dtype, device = self._log.metas[number]
            new: _StandIn = _torch.tensor_without_data(_StandIn, shape, dtype, device, requires_grad=False)
            new.number = number
            self._stand_ins[number] = new
        return self._stand_ins[number]

    def _call(self, callee: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        key, calls = _key(callee, args, kwargs, _number_of), self._log.calls
        # A branch of the first run that only led to numbers may be missing here.
        at = next((n for n in range(self._at, len(calls)) if calls[n].key == key), None)
        if at is None:
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
                return run()
            raise self._differs(callee)
        self._at, call = at + 1, calls[at]
        if call.read is not None:
            return _read(callee, self._values[call.read], args, kwargs)
        leaves = [self.stand_in(leaf.number) if isinstance(leaf, _Number) else leaf for leaf in call.leaves]
        return pytree.tree_unflatten(leaves, call.tree)

    def _differs(self, callee: Any) -> _PathError:
        line, code = source.running_line()
        reads = list(dict.fromkeys(call.line for call in self._log.calls if call.read is not None))
        read = "".join(f"\n  {where}   {text}" for where, text in reads[:3])
        name = getattr(callee, "__name__", type(callee).__name__)
        return _PathError(
            f"{name}() is called because of a value that was read, or with it\n  {line}   {code}\n"
            f"Values are read at{read}\n"
            "A step is one graph for all values: it may collect them, but they cannot decide what it computes. "
            "Keep the value as a tensor, or use torch.where."
        )


class _PathError(CaptureError):
    """A repeated function calls other operators than while it was traced."""


def _repeat(log: Log, method: Callable[..., Any], args: Any, kwargs: Any, values: Any) -> None:
    repeat = _Repeat(log, values)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    numbers = iter(range(len(log.metas)))
    stand_ins = [repeat.stand_in(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(stand_ins, tree)
    with _whole_batch(), replaying(), _torch.compiling(), _modules_by(repeat.call_module), repeat:
        result = method(*args, **kwargs)
    if [_number_of(leaf) for leaf in pytree.tree_leaves(result)] != log.results:
        raise repeat._differs(method)


@contextlib.contextmanager
def _whole_batch() -> Iterator[None]:
    token = _running.set(True)
    try:
        yield
    finally:
        _running.reset(token)


def _modules_by(call: Callable[..., Any]) -> Any:
    """Return a context in which ``call`` calls modules: it gets the original method, the module and the arguments."""
    original = nn.Module.__call__

    def replaced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    return patch.object(nn.Module, "__call__", replaced)


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function on new containers: it may change its arguments."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return function(*args, **kwargs)


def _key(callee: Any, args: Any, kwargs: Any, number: Callable[[Any], int | None]) -> tuple[Any, ...]:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return callee, tree, [_Number(n) if (n := number(leaf)) is not None else _constant(leaf) for leaf in leaves]


def _constant(leaf: Any) -> Hashable:
    if isinstance(leaf, _PLAIN):
        return type(leaf), repr(leaf)
    # A parameter is itself in one run, and its replacement in the other; other objects may be new in each.
    return "a tensor from outside" if isinstance(leaf, Tensor) else type(leaf).__name__


def _number_of(leaf: Any) -> int | None:
    return leaf.number if isinstance(leaf, _StandIn) else None


def _tensors_of(key: tuple[Any, ...]) -> Iterator[_Number]:
    return (leaf for leaf in key[2] if isinstance(leaf, _Number))


def _read(function: Callable[..., Any], value: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Read a value in place of the first argument."""
    with _torch.no_modes():
        return function(value, *args[1:], **kwargs)


def _guessed(shape: Sequence[int], dtype: torch.dtype, guess: float) -> Tensor:
    limits = (
        torch.iinfo(dtype) if not dtype.is_floating_point and dtype != torch.bool and not dtype.is_complex else None
    )
    number = guess if limits is None else int(min(max(guess, limits.min), limits.max))
    with _torch.no_modes():
        return torch.full(tuple(shape), number if dtype != torch.bool else number > 0, dtype=dtype)


def _key_of(training: bool, args: Any, kwargs: Any, times: int = 1) -> Hashable:
    """Return a key of what a trace depends on. Of a batch that is ``times`` as large as these arguments."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    shown = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            shown.append(_constant(leaf))
        else:
            # A rank without rows is traced as if it had two.
            rows = [(size or 2) * times for size in leaf.shape[:1]]
            shown.append((*rows, *leaf.shape[1:], leaf.dtype))
    return training, torch.is_grad_enabled(), tree, tuple(shown)


def _sizes(log: Log) -> list[Any]:
    return [leaf for call in log.calls for leaf in call.leaves if isinstance(leaf, int)]


def _outline(value: Any, depth: int = 4) -> Any:
    """Return what can be compared of an attribute: numbers and texts, in containers of a few levels."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if depth and isinstance(value, Mapping):
        return {str(key): _outline(entry, depth - 1) for key, entry in value.items()}
    if depth and isinstance(value, (list, tuple, deque)):
        return len(value), [_outline(entry, depth - 1) for entry in value if len(value) < 100]
    return id(value)


def _copied(value: Any, depth: int = 3) -> Any:
    """Copy containers of a few levels, so that changes of the copy leave the original as it is."""
    if not depth or not isinstance(value, (dict, list, set, deque)):
        return value
    other: Any = copy.copy(value)
    if isinstance(value, dict):
        for key, entry in value.items():
            other[key] = _copied(entry, depth - 1)
    elif isinstance(value, (list, deque)):
        for number, entry in enumerate(value):
            other[number] = _copied(entry, depth - 1)
    return other


_PLAIN = (Number, str, slice, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)

_READS = {
    *(getattr(Tensor, name) for name in ("item", "tolist", "numpy", "is_nonzero", "__bool__", "__float__", "__int__")),
    *(Tensor.__index__, Tensor.__array__, Tensor.__format__, torch.is_nonzero),
}
