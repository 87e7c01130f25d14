"""A tape as a program that a graph's ``build()`` runs: only what is needed of it, under a name equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.compat.colossalai.deferred import Made, Meta
from zerograph.compat.colossalai.metadata import patched
from zerograph.compat.colossalai.tape import Call, Given, Kind, Named, Tape
from zerograph.errors import CaptureError, ZeroGraphError
from zerograph.runtime.job.process_group import digest


@dataclass(frozen=True, eq=False)
class Program:
    """What is needed of a tape, numbered anew.

    Attributes:
        calls: in order.
        tensors: the real tensors that they take; ``kinds`` says how each enters.
        losses: what ``backward()`` runs from; none for a forward.
        outputs: what is returned; ``metas`` says how each looks.
        text: equal for programs that do the same to tensors alike, on all ranks.
        draws: some call draws random numbers.
    """

    calls: tuple[Call, ...]
    tensors: tuple[Tensor, ...]
    kinds: tuple[Kind | None, ...]
    losses: tuple[Made, ...]
    outputs: tuple[Made, ...]
    metas: tuple[Meta, ...]
    text: str
    draws: bool

    def run(self, tensors: Sequence[Tensor], parameter: Callable[[str], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Repeat all calls on these tensors; return their losses and outputs.

        Raises:
            CaptureError: a call fails, which is named by the user's line.
        """
        made: list[list[Any]] = []

        def given(one: Any) -> Any:
            if isinstance(one, Made):
                return made[one.call][one.leaf]
            if isinstance(one, Given):
                return tensors[one.number]
            return parameter(one.name) if isinstance(one, Named) else one

        for call in self.calls:
            args, kwargs = pytree.tree_unflatten([given(one) for one in call.arguments], call.tree)
            with torch.set_grad_enabled(call.with_gradients):
                made.append(pytree.tree_leaves(_made_again(call, args, kwargs)))
        return [made[one.call][one.leaf] for one in self.losses], [made[one.call][one.leaf] for one in self.outputs]


def program_of(tape: Tape, losses: Sequence[Made], outputs: Sequence[Made], texts: Texts) -> Program:
    """Return the program that computes ``losses`` and ``outputs`` of a tape."""
    needed = tape.needed([*losses, *outputs])
    place = {old: new for new, old in enumerate(needed)}
    numbers: dict[int, int] = {}

    def renumbered(one: Any) -> Any:
        if isinstance(one, Made):
            return replace(one, call=place[one.call])
        return Given(numbers.setdefault(one.number, len(numbers))) if isinstance(one, Given) else one

    calls = tuple(
        replace(call, arguments=tuple(map(renumbered, call.arguments)), made={})
        for call in (tape.calls[number] for number in needed)
    )
    tensors, kinds = tuple(tape.tensors[n] for n in numbers), tuple(tape.kinds[n] for n in numbers)
    ends = tuple(map(renumbered, losses)), tuple(map(renumbered, outputs))
    steps = [
        (texts.of(call.function), [texts.of(one) for one in call.arguments], str(call.tree), call.with_gradients)
        for call in calls
    ]
    shown = " -> ".join(name.rpartition(".")[2] for name, *_ in steps)
    number = digest((steps, kinds, [(tuple(one.shape), one.dtype) for one in tensors], ends)) % 2**32
    text = f"{shown}{', backward' if losses else ''} (#{number:08x})"
    draws = any(call.outcome.draws for call in calls)
    return Program(calls, tensors, kinds, *ends, tuple(map(tape.meta, outputs)), text, draws)


class Texts:
    """Text for functions and constants: equal on all ranks for what is equal, and different for what is not."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._seen: dict[str, list[Any]] = {}

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
        # What has no text of its own has the number in which it came, the same on all ranks.
        seen = self._seen.setdefault(name, [])
        number = next((n for n, one in enumerate(seen) if one is value or _same(one, value)), len(seen))
        if number == len(seen):
            seen.append(value)
        return f"{name}{f' {number}' if number else ''}"


_PLAIN = (
    *(bool, int, float, complex, str, type(None), slice, type(Ellipsis), Made, Given, Named),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def _made_again(call: Call, args: Any, kwargs: Any) -> Any:
    try:
        return patched(call.function)(*args, **kwargs)
    except ZeroGraphError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if call.module:
            # The line is in the module, and the error as it would be in plain PyTorch.
            raise
        line, code = call.line
        raise CaptureError(
            f"the step cannot repeat a call: {type(error).__name__}: {error}\n  {line}   {code}"
        ) from error
