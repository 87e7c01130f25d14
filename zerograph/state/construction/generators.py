"""Track random generators while draws are only recorded: which states the user saves, restores or sets.

Recording draws no numbers, so a generator's state does not change with a draw. After each recorded draw the generator
is seeded with a random number, its *token*. If the user saves and restores that state, the token identifies the draw.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.state.construction.program import Reseed


@dataclass(eq=False)
class Watched:
    """A generator that the construction draws from.

    Attributes:
        original: its state at its first use; restored if the construction fails.
        initial: the state that the recorded program starts in: ``original``, or rank 0's for the default generators.
        tokens: from states that recording gave the generator to the number of the entry that drew last; -1: no draw.
        last_state: its state at the last look.
    """

    generator: torch.Generator
    original: Tensor
    initial: Tensor  # on the CPU; overwritten in place by rank 0's state
    tokens: dict[bytes, int]
    last_state: bytes


@dataclass(eq=False)
class Generators:
    """The generators that the construction draws from, in order of their first use."""

    watched: list[Watched] = field(default_factory=list)

    def number(self, generator: torch.Generator) -> int:
        """Return the generator's number; start to watch it at the first call."""
        for number, watched in enumerate(self.watched):
            if watched.generator is generator or watched.generator == generator:
                return number
        state = generator.get_state()
        self.watched.append(Watched(generator, state, state.clone(), {_key(state): -1}, _key(state)))
        return len(self.watched) - 1

    def take_reseed(self, number: int) -> Reseed | None:
        """Return the user's change of the generator's state since the last look, or None."""
        watched = self.watched[number]
        state = watched.generator.get_state()
        if (key := _key(state)) == watched.last_state:
            return None
        watched.last_state = key
        return Reseed(number, None, watched.tokens[key]) if key in watched.tokens else Reseed(number, state, -1)

    def mark_draw(self, number: int, entry: int) -> None:
        """Give the generator a token for the program's entry that draws from it."""
        watched = self.watched[number]
        watched.generator.manual_seed(secrets.randbits(63))
        watched.last_state = _key(watched.generator.get_state())
        watched.tokens[watched.last_state] = entry

    def restore(self) -> None:
        """Set all generators to their original states."""
        for watched in self.watched:
            watched.generator.set_state(watched.original)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of the device."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator


def _key(state: Tensor) -> bytes:
    with _torch.plain_tensors():
        return state.numpy().tobytes()
