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
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.capture.selected import is_mask_of, selected
from zerograph.errors import CaptureError, InputError, ZeroGraphWarning
from zerograph.graph import building
from zerograph.integrations.replay import (
    DEVICE,
    ORIGINAL,
    READS,
    Call,
    Log,
    Match,
    Numbered,
    PathError,
    Place,
    Reached,
    Replay,
    constant,
    guessed,
    key_of_call,
    modules_by,
    read,
    tensors_of,
    whole_batch,
)


@dataclass(frozen=True)
class Variant:
    """The operators that a method calls now, which may depend on a counter of the trainer, for instance.

    Attributes:
        number: equal for calls that compute the same, apart from ``inputs``.
        inputs: numbers that are inputs of the graph, by their places in the calls.
        is_done: the method's Python has run for this call.
    """

    number: int = 0
    inputs: Mapping[Place, float] = field(default_factory=dict)
    is_done: bool = False

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Return the inputs, as 0-d tensors."""
        return [torch.tensor(value, dtype=torch.float64, device=device) for value in self.inputs.values()]


@dataclass(eq=False)
class _Variants:
    """The variants of calls whose arguments are nested alike.

    Attributes:
        now: the number of the latest.
        inputs: those of the latest.
        places: of the numbers that are inputs, by variant.
        logs: one log of each variant.
    """

    now: int = 0
    inputs: Mapping[Place, float] = field(default_factory=dict)
    places: list[tuple[Place, ...]] = field(default_factory=lambda: [()])
    logs: dict[int, Log] = field(default_factory=dict)


class Readings:
    """The logs of a method that is recorded as one call.

    Args:
        method: the method. While it is traced it gets a copy of its object, which takes what the method changes.
        substituted: returns a context for each run of the method without values.
        only_with_values: methods of its object, such as ``log``, that the method may call, and that do nothing in runs
            without values.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        substituted: Callable[[], Any] = contextlib.nullcontext,
        only_with_values: Sequence[str] = (),
    ) -> None:
        self._method, self._substituted, self._only_with_values = method, substituted, only_with_values
        # By the key of a call, whether they are those of the whole batch, and the variant.
        self._logs: dict[tuple[Hashable, bool, int], Log] = {}
        # The key of the call that is being recorded.
        self._key: Hashable = None
        self._variants: dict[Hashable, _Variants] = {}

    def variant(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Return what the method computes now, before the call is recorded.

        To be called before each call. The method's Python runs once more, up to the first value that it reads. Where it
        calls other operators than before, or the same with other numbers, this is another variant. Numbers in
        arithmetic become inputs of the graph.

        Args:
            training: the mode of its model.
            args: its arguments, of this rank.
            kwargs: its keyword arguments.
        """
        self._key = _key_of(training, args, kwargs)
        kind = self._variants.setdefault(_kind_of(training, args, kwargs), _Variants())
        if not kind.logs:
            return Variant()
        numbers = sorted(kind.logs, key=lambda number: (number != kind.now, -number))
        for number in numbers:
            own = self._logs.get((self._key, True, number)) or self._logs.get((self._key, False, number))
            match = Match.EXACT if own is not None else Match.ANY_SIZE
            if (found := self._tried(own or kind.logs[number], args, kwargs, match)) is not None:
                # A call that only led to numbers may be missing.
                kind.inputs = {place: found.inputs.get(place, 0.0) for place in kind.places[number]}
                kind.now = number
                return replace(found, number=number, inputs=kind.inputs)
        found = self._tried(kind.logs[numbers[0]], args, kwargs, Match.ANY_NUMBER)
        assert found is not None
        kind.now = len(kind.places)
        kind.inputs = found.inputs
        kind.places.append(tuple(found.inputs))
        if kind.now == _MANY:
            warnings.warn(
                _CHANGES.format(self._method.__name__, _MANY), ZeroGraphWarning, stacklevel=source.levels_to_user()
            )
        return replace(found, number=kind.now)

    def _tried(self, log: Log, args: tuple[Any, ...], kwargs: dict[str, Any], match: Match) -> Variant | None:
        """Run the method's Python as far as no value is needed; None if it does not agree with the log.

        With ``Match.ANY_NUMBER`` it runs as far as it agrees.
        """
        owner = getattr(self._method, "__self__", None)
        # What changes nothing may run on the object itself.
        pure = not log.reads and not log.changes
        replay = Replay(log, None, match=match)
        with self._substituted():
            before = dict(vars(owner)) if pure and owner is not None else None
            try:
                replay.run(self._method if pure else self._copied()[1], args, kwargs)
            except Reached:
                pass
            except PathError:
                if before is not None:
                    vars(owner).clear()
                    vars(owner).update(before)
                return Variant(0, replay.numbers) if match is Match.ANY_NUMBER else None
        return Variant(0, replay.numbers, pure)

    def traced(
        self,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int = 0,
        inputs: Sequence[Tensor] = (),
    ) -> tuple[Any, list[Tensor]]:
        """Call the method on tensors without values.

        Args:
            training: the mode of its model, on which logs depend.
            args: the arguments of the method.
            kwargs: its keyword arguments.
            number: the number of the variant.
            inputs: the variant's inputs, as 0-d tensors.

        Returns:
            The result, and the tensors whose values the method reads.

        Raises:
            CaptureError: what the method computes depends on a value that it reads, or a tensor is kept.
        """
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # The logs of a step are made before it is built, from sizes that are numbers.
        log = None if building() else Log()
        kind = self._variants.setdefault(_kind_of(training, args, kwargs), _Variants())
        trace = _Trace(log, [*tensors, *inputs], dict(zip(kind.places[number], inputs, strict=True)))
        with self._substituted():
            owner, call = self._copied()
            before = _outline(vars(owner)) if owner is not None else {}
            with whole_batch(), modules_by(trace.call_module), trace:
                result = _called(call, args, kwargs)
        if log is None:
            return result, trace.reads
        if owner is not None:
            self._check_kept(owner, before, trace)
            log.changes = _outline(vars(owner)) != before
        log.results = [trace.number(leaf) for leaf in pytree.tree_leaves(result)]
        log.inputs = trace.replaced
        if any(kind.inputs.get(place, value) != value for place, value in log.inputs.items()):
            raise CaptureError(
                f"{self._method.__name__}() computes with numbers in another order than before\n"
                "Decide with tensors (torch.where), or pass what changes as a tensor of the batch."
            )
        if log.reads:
            self._check_paths(log, args, kwargs)
        self._logs[self._key, _key_of(training, args, kwargs) != self._key, number] = log
        kind.logs.setdefault(number, log)
        return result, trace.reads

    def log_of(self, number: int = 0) -> Log | None:
        """Return the log of the last call, which is of this variant, if it must be repeated."""
        own, whole = (self._logs.get((self._key, is_whole, number)) for is_whole in (False, True))
        log = whole if whole is not None else own
        if log is None or not (log.reads or log.changes):
            return None
        if own is not None and own is not log and _sizes(own) != _sizes(log):
            log.counts_samples = True
        return log

    def repeat(
        self,
        log: Log,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Sequence[Tensor],
        inputs: Mapping[Place, float] | None = None,
    ) -> None:
        """Run the method once more, with the values that it reads.

        Args:
            log: the log of its trace.
            args: its arguments; tensors stand for those of the trace.
            kwargs: its keyword arguments.
            values: the values of the tensors that it reads.
            inputs: the inputs of its variant.

        Raises:
            CaptureError: it calls other operators, because of a value that it has read.
        """
        Replay(log, values, inputs).run(self._method, args, kwargs)

    def _copied(self) -> tuple[Any, Callable[..., Any]]:
        owner = getattr(self._method, "__self__", None)
        if owner is None:
            return None, self._method
        other = copy.copy(owner)
        for name, value in vars(owner).items():
            vars(other)[name] = _copied(value)
        for name in self._only_with_values:
            # A change of the copy, for which the method is repeated.
            vars(other)[name] = lambda *_, name=name, **__: vars(other).__setitem__(f"_zerograph_called_{name}", True)
        if isinstance(owner, nn.Module):
            vars(other)[ORIGINAL] = owner
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
            try:
                with self._substituted():
                    Replay(log, _Guesses(log, guess), log.inputs).run(self._copied()[1], args, kwargs)
            except PathError:
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
        number = next(leaf.number for call in self.log.calls if call.read == read for leaf in tensors_of(call.key))
        shape, dtype, _ = self.log.metas[number]
        return guessed(shape, dtype, self.guess)


# After so many variants of a method users are told.
_MANY = 8
_CHANGES = (
    "{}() has computed something else, or with other numbers, in {} of its calls: each is compiled by itself\n"
    "Decide with tensors (torch.where), or pass what changes as a tensor of the batch."
)

# Stand-ins for values: the trace uses the first, and others must lead to the same operators.
_FIRST_GUESS, *_GUESSES = 1.0, 0.0, -1e6, 1e6
_OWN_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Trace(TorchFunctionMode):
    """Collect the tensors that are read, and log all calls of operators."""

    def __init__(self, log: Log | None, inputs: Sequence[Tensor], lifted: Mapping[Place, Tensor]) -> None:
        super().__init__()
        self.reads: list[Tensor] = []
        self.replaced: dict[Place, float] = {}
        self._log, self._lifted, self._in_module, self._calls = log, lifted, False, 0
        # Tensors stay referenced, so that no other tensor gets their id.
        self._numbers: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        for tensor in inputs:
            self._numbered(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_module:
            return func(*args, **kwargs)
        if self._lifted:
            args, kwargs = self._with_inputs(args, kwargs)
        if func in READS:
            tensor = args[0]
            self.reads.append(tensor.detach().clone())
            sizes = [_torch.size_hint(size) for size in tensor.shape]
            result: Any = read(func, guessed(sizes, tensor.dtype, _FIRST_GUESS), args, kwargs)
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

    def _with_inputs(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the next call, with inputs of the graph for numbers that change."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        for place, tensor in self._lifted.items():
            if place[0] == self._calls and place[1] < len(leaves) and isinstance(leaves[place[1]], (int, float)):
                self.replaced[place] = leaves[place[1]]
                (like,) = (leaf for leaf in leaves if isinstance(leaf, Tensor))
                leaves[place[1]] = tensor.to(like.dtype)
        return pytree.tree_unflatten(leaves, tree)

    def number(self, leaf: Any) -> int | None:
        """Return the number of a tensor of the trace."""
        return self._numbers.get(id(leaf))

    def _note(self, callee: Any, args: Any, kwargs: Any, result: Any, read: int | None = None) -> None:
        arguments = pytree.tree_leaves((args, kwargs))
        leaves, tree = pytree.tree_flatten(result)
        if callee == DEVICE or (read is None and not any(isinstance(leaf, Tensor) for leaf in (*arguments, *leaves))):
            return
        self._calls += 1
        if self._log is None:
            return
        key = key_of_call(callee, args, kwargs, self.number)
        shown = tuple(Numbered(self._numbered(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._log.calls.append(Call(key, tree, shown, read, source.running_line()))
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


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function on new containers: it may change its arguments."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return function(*args, **kwargs)


def check_shared_evenly(name: str, rows: int, total: int, parts: int) -> None:
    """Raise for a method that counts samples of a batch which the ranks share unevenly.

    Args:
        name: the name of the method.
        rows: number of this rank's samples.
        total: number of samples of all ranks.
        parts: number of parts of the batch.

    Raises:
        InputError: the ranks share the samples unevenly.
    """
    if total != rows * parts:
        raise InputError(
            f"{name}() counts the samples of a batch, {total}, which {parts} ranks share unevenly\n"
            "Count with a tensor, such as torch.ones_like(labels).sum(), or leave out the last batch: drop_last=True, "
            "dataloader_drop_last=True."
        )


def _kind_of(training: bool, args: Any, kwargs: Any) -> Hashable:
    """Return a key of how the arguments of a call are nested."""
    return training, torch.is_grad_enabled(), pytree.tree_structure((args, kwargs))


def _key_of(training: bool, args: Any, kwargs: Any) -> Hashable:
    """Return a key of what a trace depends on."""
    shown = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor):
            shown.append(constant(leaf))
        else:
            # A rank without rows is traced as if it had two.
            rows = [size or 2 for size in leaf.shape[:1]]
            shown.append((*rows, *leaf.shape[1:], leaf.dtype))
    return _kind_of(training, args, kwargs), tuple(shown)


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
