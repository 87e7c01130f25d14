"""Turn a tape into a program that a graph's ``build()`` runs: the needed calls, with a name equal on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError, ZeroGraphError
from zerograph.loops.deferred import Meta, Result, replaying
from zerograph.loops.metadata import patched
from zerograph.loops.tape import Call, Kind, Named, Outcome, RealTensor, Tape
from zerograph.runtime.job.process_group import digest


@dataclass(frozen=True, eq=False)
class Program:
    """The needed calls of a tape, renumbered.

    Attributes:
        calls: the calls, in order.
        tensors: the real tensors that they take.
        kinds: how each real tensor enters the step.
        losses: the losses for ``backward()``; none for a forward.
        outputs: the returned results.
        metas: the metadata of each output.
        text: equal on all ranks for programs that make the same calls on tensors of the same shapes.
        draws: whether a call draws random numbers.
        early: number of outputs, the first ones, that are computed before ``backward()``.
    """

    calls: tuple[Call, ...]
    tensors: tuple[Tensor, ...]
    kinds: tuple[Kind | None, ...]
    losses: tuple[Result, ...]
    outputs: tuple[Result, ...]
    metas: tuple[Meta, ...]
    text: str
    draws: bool
    early: int = 0

    def run(self, tensors: Sequence[Tensor], parameter: Callable[[str], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Repeat all calls on these tensors; return their losses and outputs.

        Raises:
            CaptureError: a call fails; the message has the user's line.
        """
        results: list[list[Any]] = []

        def value_of(argument: Any) -> Any:
            if isinstance(argument, Result):
                return results[argument.call][argument.leaf]
            if isinstance(argument, RealTensor):
                return tensors[argument.number]
            return parameter(argument.name) if isinstance(argument, Named) else argument

        for call in self.calls:
            args, kwargs = pytree.tree_unflatten([value_of(argument) for argument in call.arguments], call.tree)
            tensors_of_call = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            device = next((tensor.device.type for tensor in tensors_of_call), "cpu")
            with torch.set_grad_enabled(call.with_gradients), autocast_of(call, device), replaying():
                results.append(pytree.tree_leaves(_repeated(call, args, kwargs)))
        return [value_of(loss) for loss in self.losses], [value_of(output) for output in self.outputs]

    def described(self) -> list[Any]:
        """Return all that :meth:`run` depends on besides tensors, with the lines of the user that nodes get."""
        calls = [
            [
                *map(_described, (call.function, *call.arguments)),
                *(str(call.tree), call.with_gradients, call.again, call.autocast, call.line),
            ]
            for call in self.calls
        ]
        return [calls, repr((self.kinds, self.losses, self.outputs, self.early)), source.running_line()]


@dataclass(frozen=True)
class _Unknown:
    """A function of zerograph's, of which a digest would not see what its closure contains."""

    name: str


def _described(value: Any) -> Any:
    """Return a function or an argument as a digest tells it whole."""
    if isinstance(value, (Result, RealTensor, Named)):
        return (repr(value),)
    module, closure = getattr(value, "__module__", None) or "", getattr(value, "__closure__", ())
    if module.partition(".")[0] == "zerograph" and not (module.startswith("zerograph.loops.") and closure is None):
        return _Unknown(module)
    return value


def program_of(
    tape: Tape,
    losses: Sequence[Result],
    outputs: Sequence[Result],
    texts: Texts,
    needed: Sequence[int] | None = None,
    *,
    any_size: bool = False,
) -> Program:
    """Return the program that computes ``losses`` and ``outputs`` of a tape.

    Args:
        tape: the recorded calls.
        losses: the losses for ``backward()``.
        outputs: the results to return.
        texts: of functions and constants.
        needed: the calls of the program; None: those that the results need, and those with side effects.
        any_size: programs on parts of the batch of other sizes are the same.
    """
    needed = tape.needed([*losses, *outputs]) if needed is None else needed
    place = {old: new for new, old in enumerate(needed)}
    numbers: dict[int, int] = {}

    def renumbered(argument: Any) -> Any:
        if isinstance(argument, Result):
            return Result(place[argument.call], argument.leaf)
        if isinstance(argument, RealTensor):
            return RealTensor(numbers.setdefault(argument.number, len(numbers)))
        return argument

    calls = tuple(
        replace(call, arguments=tuple(map(renumbered, call.arguments)), results={})
        for call in (tape.calls[number] for number in needed)
    )
    tensors, kinds = tuple(tape.tensors[n] for n in numbers), tuple(tape.kinds[n] for n in numbers)
    ends = tuple(map(renumbered, losses)), tuple(map(renumbered, outputs))
    shapes = tuple(
        (tensor.dim() if any_size and kind == "part" else tuple(tensor.shape), tensor.dtype)
        for tensor, kind in zip(tensors, kinds, strict=True)
    )
    key = tuple(texts.key(call, call.arguments) for call in calls), kinds, shapes, ends
    if (text := texts.programs.get(key)) is None:
        text = texts.programs[key] = _text(calls, (kinds, shapes, ends), texts)
    draws = any(call.outcome.draws for call in calls)
    return Program(calls, tensors, kinds, *ends, tuple(map(tape.meta, outputs)), text, draws)


def _text(calls: Sequence[Call], others: tuple[Any, ...], texts: Texts) -> str:
    steps = [
        (
            texts.of(call.function),
            [texts.of(argument) for argument in call.arguments],
            str(call.tree),
            call.with_gradients,
            call.again,
            texts.of(call.autocast),
        )
        for call in calls
    ]
    shown = " -> ".join(name.rpartition(".")[2] for name, *_ in steps)
    _, _, (losses, _) = others
    return f"{shown}{', backward' if losses else ''} (#{digest((steps, *others)) % 2**32:08x})"


class Texts:
    """Texts of functions and constants, which are equal on all ranks exactly for equal values.

    Attributes:
        programs: the texts of programs, by what they were made of.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._seen: dict[str, list[Any]] = {}
        self.programs: dict[Hashable, str] = {}
        # The text of what is fixed in a call, by its outcome, which stays referenced.
        self._fixed: dict[int, tuple[Outcome, str]] = {}

    def key(self, call: Call, arguments: Sequence[Any]) -> Hashable:
        """Return a key that is equal in this process for calls that do the same. It is found faster than a text.

        Args:
            call: the call.
            arguments: its arguments, with any hashable objects for results and real tensors.
        """
        varying = tuple(a for a, own in zip(arguments, call.arguments, strict=True) if isinstance(own, _TENSORS))
        if not call.outcome.shared:
            return self._text_of_fixed(call), varying, call.again, call.autocast
        if id(call.outcome) not in self._fixed:
            self._fixed[id(call.outcome)] = call.outcome, self._text_of_fixed(call)
        return self._fixed[id(call.outcome)][1], varying, call.again, call.autocast

    def _text_of_fixed(self, call: Call) -> str:
        constants = ["" if isinstance(argument, _TENSORS) else self.of(argument) for argument in call.arguments]
        return str((self.of(call.function), constants, str(call.tree), call.with_gradients))

    def of(self, value: Any) -> str:
        """Return the text of ``value``."""
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        if name.startswith("getset_descriptor"):
            name = f"{name}.{getattr(owner, '__name__', '')}"
        # A value without a text is numbered in order of first use, which is equal on all ranks.
        seen = self._seen.setdefault(name, [])
        number = next((n for n, other in enumerate(seen) if other is value or _same(other, value)), len(seen))
        if number == len(seen):
            seen.append(value)
        return f"{name}{f' {number}' if number else ''}"


_TENSORS = (Result, RealTensor)
_PLAIN = (
    *(bool, int, float, complex, str, type(None), slice, type(Ellipsis), Result, RealTensor, Named),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def _same(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):
        return False


def autocast_of(call: Call, device: str) -> contextlib.AbstractContextManager[Any]:
    """Return ``torch.autocast`` as it was around a call."""
    return contextlib.nullcontext() if call.autocast is None else torch.autocast(device, call.autocast)


def _unwritten(function: Any) -> contextlib.AbstractContextManager[None]:
    """Return a block in which a module writes to copies of its buffers."""
    if not isinstance(function, nn.Module):
        return contextlib.nullcontext()
    return _torch.with_tensors(function, {name: buffer.clone() for name, buffer in function.named_buffers()})


def _repeated(call: Call, args: Any, kwargs: Any) -> Any:
    try:
        with _unwritten(call.function) if call.again else contextlib.nullcontext():
            return patched(call.function)(*args, **kwargs)
    except ZeroGraphError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if call.module:
            # The error is raised in the module, as in plain PyTorch.
            raise
        line, code = call.line
        raise CaptureError(
            f"the step cannot repeat a call: {type(error).__name__}: {error}\n  {line}   {code}"
        ) from error
