"""The calls of a traced function, and running its Python again without computing anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from numbers import Number
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.loops.deferred import replaying
from zerograph.loops.tape import ARITHMETIC

_running: ContextVar[bool] = ContextVar("running", default=False)


def sees_whole_batch() -> bool:
    """Return whether a recorded function runs, whose tensors are those of all ranks already."""
    return _running.get()


@dataclass(frozen=True)
class Call:
    """A call of an operator or a module while the function was traced.

    Attributes:
        key: the callee and its arguments, with numbers for tensors.
        tree: how the results are nested.
        leaves: the results, with :class:`Numbered` for tensors.
        read: the number of the value that it reads, or None.
        line: the user's line.
    """

    key: tuple[Any, ...]
    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    read: int | None
    line: tuple[str, str]


@dataclass(frozen=True)
class Numbered:
    """Tensor number ``number`` of a log."""

    number: int


# The attribute of a copy of a module that refers to the module.
ORIGINAL = "_zerograph_original"

# An argument of a call: the number of the call, and that of the flat argument.
Place = tuple[int, int]


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
        inputs: numbers that are inputs of the graph, by their places in the calls.
    """

    calls: list[Call] = field(default_factory=list)
    metas: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)
    reads: int = 0
    changes: bool = False
    counts_samples: bool = False
    inputs: Mapping[Place, float] = field(default_factory=dict)


class StandIn(Tensor):
    """A tensor of a log, without data."""

    number: int

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CaptureError(f"{func} needs the data of a tensor that has been computed in the step already")


class Match(Enum):
    """How a replayed function must agree with its log."""

    EXACT = auto()
    # Sizes differ: integers may.
    ANY_SIZE = auto()
    # Numbers in arithmetic may differ.
    ANY_NUMBER = auto()


class Reached(Exception):  # noqa: N818
    """A replayed function without values has reached its first read."""


class Replay(TorchFunctionMode):
    """Return what a log's calls returned; reads return values.

    Args:
        log: the calls.
        values: the values by the number of the read; None: raise :class:`Reached` at the first read.
        inputs: the values of numbers that are inputs of the graph; None: any.
        match: how the calls must agree.

    Attributes:
        numbers: the numbers that are inputs, or that differ from the log's, by their places.
    """

    def __init__(
        self, log: Log, values: Any, inputs: Mapping[Place, float] | None = None, match: Match = Match.EXACT
    ) -> None:
        super().__init__()
        self._log, self._values, self._inputs, self._match, self._at = log, values, inputs, match, 0
        self._stand_ins: dict[int, StandIn] = {}
        self.numbers: dict[Place, float] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == DEVICE:
            return func(*args, **kwargs)
        return self._call(func, args, kwargs, lambda: func(*args, **kwargs))

    def call_module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what the module returned."""
        return self._call(module, args, kwargs, lambda: call(module, *args, **kwargs))

    def run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run a function for its Python alone.

        Args:
            method: the function.
            args: its arguments; tensors stand for those of the trace.
            kwargs: its keyword arguments.

        Raises:
            PathError: it calls other operators than the log has.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        numbers = iter(range(len(self._log.metas)))
        stand_ins = [self._stand_in(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(stand_ins, tree)
        with whole_batch(), replaying(), _torch.compiling(), modules_by(self.call_module), self:
            result = method(*args, **kwargs)
        if [number_of(leaf) for leaf in pytree.tree_leaves(result)] != self._log.results:
            raise self._differs(method)

    def _stand_in(self, number: int) -> Tensor:
        if number not in self._stand_ins:
            shape, dtype, device = self._log.metas[number]
            new: StandIn = _torch.tensor_without_data(StandIn, shape, dtype, device, requires_grad=False)
            new.number = number
            self._stand_ins[number] = new
        return self._stand_ins[number]

    def _call(self, callee: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        key, calls = key_of_call(callee, args, kwargs, number_of), self._log.calls
        # A branch of the first run that only led to numbers may be missing here.
        at = next((n for n in range(self._at, len(calls)) if self._matches(n, key)), None)
        # Places of numbers are those of a new trace as long as no call is missing.
        if at is None or (self._match is Match.ANY_NUMBER and at > self._at):
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
                return run()
            raise self._differs(callee)
        self._at, call = at + 1, calls[at]
        if call.read is not None:
            if self._values is None:
                raise Reached
            return read(callee, self._values[call.read], args, kwargs)
        leaves = [self._stand_in(leaf.number) if isinstance(leaf, Numbered) else leaf for leaf in call.leaves]
        return pytree.tree_unflatten(leaves, call.tree)

    def _matches(self, at: int, key: tuple[Any, ...]) -> bool:
        """Return whether a call is call number ``at`` of the log; note its numbers."""
        call = self._log.calls[at]
        own = call.key
        if own[:2] != key[:2]:
            return False
        numbers: dict[Place, float] = {}
        for leaf, (first, second) in enumerate(zip(own[2], key[2], strict=True)):
            place = at, leaf
            if place in self._log.inputs:
                if not _is_number(second) or (self._inputs or {}).get(place, second[1]) != second[1]:
                    return False
                numbers[place] = second[1]
            elif first != second:
                both = _is_number(first) and _is_number(second)
                if both and self._match is Match.ANY_NUMBER and self._is_arithmetic(call):
                    numbers[place] = second[1]
                elif not (both and self._match is Match.ANY_SIZE and first[0] is second[0] is int):
                    return False
        self.numbers |= numbers
        return True

    def _is_arithmetic(self, call: Call) -> bool:
        """Return whether a call computes with a number as it would with a 0-d tensor."""
        wide = (torch.float32, torch.float64)
        return getattr(call.key[0], "__name__", "") in ARITHMETIC and all(
            isinstance(leaf, Numbered) and self._log.metas[leaf.number][1] in wide for leaf in call.leaves
        )

    def _differs(self, callee: Any) -> PathError:
        line, code = source.running_line()
        reads = list(dict.fromkeys(call.line for call in self._log.calls if call.read is not None))
        read = "".join(f"\n  {where}   {text}" for where, text in reads[:3])
        name = getattr(callee, "__name__", type(callee).__name__)
        return PathError(
            f"{name}() is called because of a value that was read, or with it\n  {line}   {code}\n"
            f"Values are read at{read}\n"
            "A step is one graph for all values: it may collect them, but they cannot decide what it computes. "
            "Keep the value as a tensor, or use torch.where."
        )


class PathError(CaptureError):
    """A repeated function calls other operators than while it was traced."""


@contextlib.contextmanager
def whole_batch() -> Iterator[None]:
    """Return a block in which :func:`sees_whole_batch` is true."""
    token = _running.set(True)
    try:
        yield
    finally:
        _running.reset(token)


def modules_by(call: Callable[..., Any]) -> Any:
    """Return a context in which ``call`` calls modules: it gets the original method, the module and the arguments."""
    original = nn.Module.__call__

    def replaced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    return patch.object(nn.Module, "__call__", replaced)


def key_of_call(callee: Any, args: Any, kwargs: Any, number: Callable[[Any], int | None]) -> tuple[Any, ...]:
    """Return the callee, how its arguments are nested, and the flat arguments with numbers for tensors."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if isinstance(callee, nn.Module):
        callee = vars(callee).get(ORIGINAL, callee)
    return callee, tree, [Numbered(n) if (n := number(leaf)) is not None else constant(leaf) for leaf in leaves]


def constant(leaf: Any) -> Hashable:
    """Return what can be compared of an argument that is no tensor of the log."""
    if type(leaf) in (int, float) and leaf == leaf:
        return type(leaf), leaf
    if isinstance(leaf, _PLAIN):
        return type(leaf), repr(leaf)
    # A parameter is itself in one run, and its replacement in the other; other objects may be new in each.
    return "a tensor from outside" if isinstance(leaf, Tensor) else type(leaf).__name__


def _is_number(constant: Any) -> bool:
    return isinstance(constant, tuple) and type(constant[1]) in (int, float)


def number_of(leaf: Any) -> int | None:
    """Return the number of a tensor of a log, or None."""
    return leaf.number if isinstance(leaf, StandIn) else None


def tensors_of(key: tuple[Any, ...]) -> Iterator[Numbered]:
    """Return the tensors among the arguments of a call."""
    return (leaf for leaf in key[2] if isinstance(leaf, Numbered))


def read(function: Callable[..., Any], value: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Read a value in place of the first argument."""
    with _torch.no_modes():
        return function(value, *args[1:], **kwargs)


def guessed(shape: Sequence[int], dtype: torch.dtype, guess: float) -> Tensor:
    """Return a value for a tensor that has none."""
    limits = (
        torch.iinfo(dtype) if not dtype.is_floating_point and dtype != torch.bool and not dtype.is_complex else None
    )
    number = guess if limits is None else int(min(max(guess, limits.min), limits.max))
    with _torch.no_modes():
        return torch.full(tuple(shape), number if dtype != torch.bool else number > 0, dtype=dtype)


_PLAIN = (Number, str, slice, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)

# Not part of a log: a fake tensor returns its device without a call of __torch_function__.
DEVICE = Tensor.device.__get__

READS = {
    *(getattr(Tensor, name) for name in ("item", "tolist", "numpy", "is_nonzero", "__bool__", "__float__", "__int__")),
    *(Tensor.__index__, Tensor.__array__, Tensor.__format__, torch.is_nonzero),
}
