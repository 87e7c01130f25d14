"""Random generators while nothing is drawn: which state of theirs the user saves, restores or sets.

Recording draws no numbers, so a generator's state says nothing of how much has been drawn. It is given a state of our
own after each recorded draw, which no seed leads to; saving it and restoring it later thereby names the draw.
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
    """A generator that is drawn from.

    Attributes:
        found: its state when it was first met.
        entry: the state in which what is recorded begins; rank 0's, where all ranks take that.
        tokens: the number of the entry that drew last, by each state that we gave it since; -1: none.
        now: the state as it was when we looked last.
    """

    generator: torch.Generator
    found: Tensor
    entry: Tensor
    tokens: dict[bytes, int]
    now: bytes


@dataclass(eq=False)
class Generators:
    """The generators that the construction draws from, in order of their first use."""

    watched: list[Watched] = field(default_factory=list)

    def number(self, generator: torch.Generator) -> int:
        """The generator's number; from its first mention on it is watched."""
        for number, one in enumerate(self.watched):
            if one.generator is generator or one.generator == generator:
                return number
        state = generator.get_state()
        self.watched.append(Watched(generator, state, state.clone(), {_key(state): -1}, _key(state)))
        return len(self.watched) - 1

    def changed(self, number: int) -> Reseed | None:
        """What the user did to the generator's state since the last look."""
        one = self.watched[number]
        state = one.generator.get_state()
        if (key := _key(state)) == one.now:
            return None
        one.now = key
        return Reseed(number, None, one.tokens[key]) if key in one.tokens else Reseed(number, state, -1)

    def drew(self, number: int, entry: int) -> None:
        """The program's entry of that number is to draw from the generator."""
        one = self.watched[number]
        one.generator.manual_seed(secrets.randbits(63))
        one.now = _key(one.generator.get_state())
        one.tokens[one.now] = entry

    def restore(self) -> None:
        """Put all generators into the state in which they were found."""
        for one in self.watched:
            one.generator.set_state(one.found)


def default_generator(device: torch.device) -> torch.Generator:
    """What draws on that device when nobody says otherwise."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        found: torch.Generator = torch.cuda.default_generators[index]
        return found
    return torch.default_generator


def _key(state: Tensor) -> bytes:
    with _torch.plain_tensors():
        return state.numpy().tobytes()
