"""Run a recorded program in real memory, and free each value after its last use."""

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

# Called with the number of a memory and the storage with its final values.
Take = Callable[[int, torch.UntypedStorage], None]


def replay(program: Program, wanted: Collection[int], generators: Generators, take: Take) -> None:
    """Run the program, and call ``take`` with each wanted memory as soon as its values are final.

    The generators end in the states in which plain construction would leave them.
    """
    draws = Draws(program, generators, once=True)
    _Replay(program, schedule(program, wanted, 0), wanted, draws, take).run()
    for watched, state in zip(generators.watched, draws.now, strict=True):
        watched.generator.set_state(state)


def values_now(program: Program, wanted: Ref, draws: Draws) -> Tensor:
    """Return the tensor's current values in the middle of a construction.

    Random numbers that it depends on are drawn here, and once more at the end.
    """
    storages: list[torch.UntypedStorage] = []
    end = len(program.entries)
    steps = schedule(program, [wanted.memory], end)
    random = any(program.entries[step.number].generator is not None for step in steps)
    if random:
        steps = schedule(program, [wanted.memory], draws.settled)
        draws.watch_more()
    states = [watched.generator.get_state() for watched in draws.generators.watched]
    try:
        _Replay(program, steps, [wanted.memory], draws, lambda _, storage: storages.append(storage)).run()
    finally:
        for watched, state in zip(draws.generators.watched, states, strict=True):
            watched.generator.set_state(state)
    draws.settled = end if random else draws.settled
    return tensor_at(wanted, storages[0])


class Draws:
    """The states of the generators while a program runs.

    Attributes:
        settled: number of entries that have run: the generator's state before each of their draws is stored.
        now: state of each generator after these entries.
    """

    def __init__(self, program: Program, generators: Generators, *, once: bool = False) -> None:
        self.generators = generators
        self.settled = 0
        self.now: list[Tensor] = []
        # A state has some thousand bytes: a program that runs once keeps only the states that a reseed restores.
        self._once = once
        restored = (entry.after for entry in program.entries if isinstance(entry, Reseed))
        self._needed = set(restored) if once else set()
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self.watch_more()

    def watch_more(self) -> None:
        """Add the initial states of generators that are watched since the last call."""
        self.now += [watched.initial for watched in self.generators.watched[len(self.now) :]]

    def reseed(self, entry: Reseed) -> None:
        """Set the generator's state as the entry says."""
        state = self.generators.watched[entry.generator].initial if entry.after < 0 else self._after[entry.after]
        self.now[entry.generator] = state if entry.state is None else entry.state

    @contextlib.contextmanager
    def drawing(self, number: int, generator: int) -> Iterator[None]:
        """Set the generator inside to the state before the draw of this entry, and store its state after it."""
        source = self.generators.watched[generator].generator
        is_repeated = number in self._before
        before = self._before.get(number, self.now[generator])
        source.set_state(before)
        yield
        if is_repeated:
            return
        self.now[generator] = after = source.get_state()
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
        self._storages: dict[int, torch.UntypedStorage] = {}

    def run(self) -> None:
        """Run the steps."""
        default_dtype = torch.get_default_dtype()
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
                torch.set_default_dtype(default_dtype)

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
            results = pytree.tree_leaves(entry.operator(*args, **kwargs))
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        input_keys = {_torch.storage_key(tensor.untyped_storage()) for tensor in inputs}
        for result, view in zip(results, entry.results, strict=True):
            if view is not None and (value := use.at[view.memory]) not in self._storages:
                self._storages[value] = self._result_storage(result, view, input_keys)

    def _result_storage(self, result: Tensor, view: Ref, input_keys: Collection[int]) -> torch.UntypedStorage:
        """Return a storage with the result in its recorded strides, which may differ from those on the device."""
        storage = result.untyped_storage()
        layout = tuple(result.shape), tuple(result.stride()), result.storage_offset(), result.dtype
        is_same = layout == (view.shape, view.stride, view.offset, view.dtype)
        if is_same and _torch.storage_key(storage) not in input_keys:
            return storage
        copy = torch.UntypedStorage(self._program.memories[view.memory].nbytes, device=storage.device)
        tensor_at(view, copy).copy_(result)
        return copy

    def _storage(self, value: int, *, overwritten: bool = False) -> torch.UntypedStorage:
        """Return the storage of a value; allocate it at its first use."""
        if value not in self._storages:
            memory = self._program.memories[self._program.memory_of[value]]
            if memory.outside:
                # The original changes only after all ranks have succeeded.
                storage = memory.storage.clone() if value in self._changed else memory.storage
            elif overwritten:
                storage = torch.UntypedStorage(memory.nbytes, device=memory.device)
            else:
                # Plain construction would see uninitialized memory here; zeros are equal on all ranks.
                storage = torch.zeros(memory.nbytes, dtype=torch.uint8, device=memory.device).untyped_storage()
            self._storages[value] = storage
        return self._storages[value]

    def _end(self, value: int) -> None:
        """Pass a wanted value to ``take``, and free the value's storage."""
        if value in self._wanted:
            self._wanted.discard(value)
            self._take(self._program.memory_of[value], self._storage(value))
        self._storages.pop(value, None)
