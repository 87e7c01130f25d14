"""Doing what was recorded, on real memory that is given back as soon as nobody needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.state.construction.generators import Generators
from zerograph.state.construction.program import Operation, Program, Ref, Reseed, tensor_at
from zerograph.state.construction.schedule import Step, schedule

# Called with the number of a memory and the storage that has its final values.
Take = Callable[[int, torch.UntypedStorage], None]


def replay(program: Program, wanted: Collection[int], generators: Generators, take: Take) -> None:
    """Do all of it; ``take`` gets each memory that is wanted as soon as its values are final.

    The generators stand afterwards where plain construction would have left them.
    """
    draws = Draws(program, generators, once=True)
    _Replay(program, schedule(program, wanted, 0), wanted, draws, take).run()
    for one, state in zip(generators.watched, draws.now, strict=True):
        one.generator.set_state(state)


def values_now(program: Program, wanted: Ref, draws: Draws) -> Tensor:
    """What a tensor holds at this point of the construction, which goes on.

    Random numbers that it depends on are drawn for it, and again at the end.
    """
    found: list[torch.UntypedStorage] = []
    end = len(program.entries)
    steps = schedule(program, [wanted.memory], end)
    random = any(program.entries[step.number].generator is not None for step in steps)
    if random:
        steps = schedule(program, [wanted.memory], draws.settled)
        draws.watch_more()
    states = [one.generator.get_state() for one in draws.generators.watched]
    try:
        _Replay(program, steps, [wanted.memory], draws, lambda _, storage: found.append(storage)).run()
    finally:
        for one, state in zip(draws.generators.watched, states, strict=True):
            one.generator.set_state(state)
    draws.settled = end if random else draws.settled
    return tensor_at(wanted, found[0])


class Draws:
    """The states that the generators go through as a program is done.

    Attributes:
        settled: the entries before this one have been done, so the states before all their draws are known.
        now: the state of each generator after them.
    """

    def __init__(self, program: Program, generators: Generators, *, once: bool = False) -> None:
        self.generators = generators
        self.settled = 0
        self.now: list[Tensor] = []
        # A state has some thousand bytes: what is done once keeps only those that something goes back to.
        self._once = once
        again = (entry.after for entry in program.entries if isinstance(entry, Reseed))
        self._needed = set(again) if once else set()
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self.watch_more()

    def watch_more(self) -> None:
        """Generators that were met since begin in the state in which they were found."""
        self.now += [one.entry for one in self.generators.watched[len(self.now) :]]

    def reseed(self, entry: Reseed) -> None:
        """Do that entry."""
        state = self.generators.watched[entry.generator].entry if entry.after < 0 else self._after[entry.after]
        self.now[entry.generator] = state if entry.state is None else entry.state

    @contextlib.contextmanager
    def drawing(self, number: int, generator: int) -> Iterator[None]:
        """Inside, the generator stands where the entry of that number is to draw."""
        one = self.generators.watched[generator].generator
        again = number in self._before
        before = self._before.get(number, self.now[generator])
        one.set_state(before)
        yield
        if again:
            return
        self.now[generator] = after = one.get_state()
        if not self._once:
            self._before[number] = before
        if not self._once or number in self._needed:
            self._after[number] = after


class _Replay:
    def __init__(
        self, program: Program, steps: Sequence[Step], wanted: Collection[int], draws: Draws, take: Take
    ) -> None:
        self._program, self._steps, self._draws, self._take = program, steps, draws, take
        self._wanted = {program.current[memory] for memory in wanted}
        changed = {value for step in steps for value in program.uses[step.number].changes}
        self._changed = {value for value in changed if program.memories[program.memory_of[value]].outside}
        self._held: dict[int, torch.UntypedStorage] = {}

    def run(self) -> None:
        before = torch.get_default_dtype()
        with torch.no_grad(), _torch.plain_tensors():
            try:
                for step in self._steps:
                    entry = self._program.entries[step.number]
                    if isinstance(entry, Reseed):
                        self._draws.reseed(entry)
                    else:
                        self._operate(step, entry)
                    for value in step.ends:
                        self._end(value)
                for value in sorted(self._wanted):
                    self._end(value)
            finally:
                torch.set_default_dtype(before)

    def _operate(self, step: Step, entry: Operation) -> None:
        use = self._program.uses[step.number]
        if torch.get_default_dtype() != entry.default_dtype:
            torch.set_default_dtype(entry.default_dtype)

        def real(argument: Any) -> Any:
            if not isinstance(argument, Ref):
                return argument
            value = use.at[argument.memory]
            return tensor_at(argument, self._storage(value, overwritten=value in use.makes))

        args: list[Any] = pytree.tree_map(real, list(entry.args))
        kwargs: dict[str, Any] = pytree.tree_map(real, entry.kwargs)
        with contextlib.nullcontext() if entry.generator is None else self._draws.drawing(step.number, entry.generator):
            made = pytree.tree_leaves(entry.operator(*args, **kwargs))
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        keys = {_torch.storage_key(one.untyped_storage()) for one in given}
        for one, wanted in zip(made, entry.results, strict=True):
            if wanted is not None and (value := use.at[wanted.memory]) not in self._held:
                self._held[value] = self._laid(one, wanted, keys)

    def _laid(self, made: Tensor, wanted: Ref, given: Collection[int]) -> torch.UntypedStorage:
        """The storage of what an operator made, laid as it was thought to be: a device may have an order of its own."""
        storage = made.untyped_storage()
        layout = tuple(made.shape), tuple(made.stride()), made.storage_offset(), made.dtype
        same = layout == (wanted.shape, wanted.stride, wanted.offset, wanted.dtype)
        if same and _torch.storage_key(storage) not in given:
            return storage
        laid = torch.UntypedStorage(self._program.memories[wanted.memory].nbytes, device=storage.device)
        tensor_at(wanted, laid).copy_(made)
        return laid

    def _storage(self, value: int, *, overwritten: bool = False) -> torch.UntypedStorage:
        if value not in self._held:
            memory = self._program.memories[self._program.memory_of[value]]
            if memory.outside:
                # It changes when all has gone well, and not before.
                found = memory.storage.clone() if value in self._changed else memory.storage
            elif overwritten:
                found = torch.UntypedStorage(memory.nbytes, device=memory.device)
            else:
                # Where plainly there would be whatever was in memory: so all ranks have the same.
                found = torch.zeros(memory.nbytes, dtype=torch.uint8, device=memory.device).untyped_storage()
            self._held[value] = found
        return self._held[value]

    def _end(self, value: int) -> None:
        if value in self._wanted:
            self._wanted.discard(value)
            self._take(self._program.memory_of[value], self._storage(value))
        self._held.pop(value, None)
