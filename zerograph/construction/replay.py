"""Doing what was recorded, on real memory that is given back as soon as nobody needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerograph import _torch
from zerograph.construction.program import Memory, Operation, Program, Ref, Reseed, tensor_at
from zerograph.construction.schedule import Schedule, Step, schedule
from zerograph.errors import CaptureError

# Called with the number of a memory and the storage that has its final values.
Take = Callable[[int, torch.UntypedStorage], None]


def replay(program: Program, wanted: Collection[int], generators: Sequence[torch.Generator], take: Take) -> None:
    """Do all of it; ``take`` gets each memory that is wanted as soon as its values are final.

    The generators, which stand where the program began, stand afterwards where it ends.
    """
    _Replay(program, schedule(program, wanted, draws=True), wanted, generators, take).run()


def values_now(program: Program, wanted: Ref) -> Tensor:
    """What a tensor holds at this point of the construction, which goes on.

    Raises:
        CaptureError: that depends on random numbers.
    """
    plan = schedule(program, [wanted.memory], draws=False)
    for step in plan.steps:
        if isinstance(step.entry, Operation) and step.entry.generator is not None:
            raise CaptureError(
                f"construction reads a value that depends on random numbers, drawn at\n  {step.entry.where}\n"
                "Inside sharded_init() nothing is drawn before the end. Leave out what looks at the value, or make the "
                "model plainly."
            )
    found: list[torch.UntypedStorage] = []
    _Replay(program, plan, [wanted.memory], (), lambda _, storage: found.append(storage)).run()
    return tensor_at(wanted, found[0])


class _Replay:
    def __init__(
        self,
        program: Program,
        plan: Schedule,
        wanted: Collection[int],
        generators: Sequence[torch.Generator],
        take: Take,
    ) -> None:
        self._memories = program.memories
        self._plan, self._generators, self._take = plan, generators, take
        self._wanted = {plan.final[memory] for memory in wanted}
        outside = {value for value, memory in enumerate(plan.memories) if self._memories[memory].outside}
        self._changed = outside & {step.values[m] for step in plan.steps for m in _written(step.entry)}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._entry = [one.get_state() for one in generators]
        # States that something later goes back to, by generator and the entry that drew last.
        steps = [step.entry for step in plan.steps]
        again = {(one.generator, one.after) for one in steps if isinstance(one, Reseed) and one.state is None}
        self._saved: dict[tuple[int, int], Tensor | None] = dict.fromkeys(again)

    def run(self) -> None:
        before = torch.get_default_dtype()
        with torch.no_grad(), _torch.plain_tensors():
            try:
                for step in self._plan.steps:
                    if isinstance(step.entry, Reseed):
                        self._reseed(step.entry)
                    else:
                        self._operate(step, step.entry)
                    for value in step.ends:
                        self._end(value)
                for value in sorted(self._wanted):
                    self._end(value)
            finally:
                torch.set_default_dtype(before)

    def _reseed(self, entry: Reseed) -> None:
        if entry.state is not None:
            state = entry.state
        elif entry.after < 0:
            state = self._entry[entry.generator]
        else:
            found = self._saved[entry.generator, entry.after]
            assert found is not None
            state = found
        self._generators[entry.generator].set_state(state)

    def _operate(self, step: Step, entry: Operation) -> None:
        if torch.get_default_dtype() != entry.default_dtype:
            torch.set_default_dtype(entry.default_dtype)

        def real(argument: Any) -> Any:
            if not isinstance(argument, Ref):
                return argument
            return tensor_at(argument, self._storage(step.values[argument.memory]))

        args, kwargs = _mapped(entry, real)
        made = pytree.tree_leaves(entry.operator(*args, **kwargs))
        given = {_torch.storage_key(one.untyped_storage()) for one in _tensors((args, kwargs))}
        for one, wanted in zip(made, entry.results, strict=True):
            if wanted is not None and (value := step.values[wanted.memory]) not in self._held:
                self._held[value] = self._laid(one, wanted, given)
        if entry.generator is not None and (key := (entry.generator, step.number)) in self._saved:
            self._saved[key] = self._generators[entry.generator].get_state()

    def _laid(self, made: Tensor, wanted: Ref, given: set[int]) -> torch.UntypedStorage:
        """The storage of what an operator made, laid as it was thought to be: a device may have an order of its own."""
        storage = made.untyped_storage()
        layout = tuple(made.shape), tuple(made.stride()), made.storage_offset(), made.dtype
        same = layout == (wanted.shape, wanted.stride, wanted.offset, wanted.dtype)
        if same and _torch.storage_key(storage) not in given:
            return storage
        laid = torch.UntypedStorage(self._memories[wanted.memory].nbytes, device=storage.device)
        tensor_at(wanted, laid).copy_(made)
        return laid

    def _storage(self, value: int) -> torch.UntypedStorage:
        if value not in self._held:
            memory = self._memories[self._plan.memories[value]]
            # What lies outside changes when all has gone well, and not before.
            self._held[value] = memory.storage.clone() if value in self._changed else _plain(memory)
        return self._held[value]

    def _end(self, value: int) -> None:
        if value in self._wanted:
            self._wanted.discard(value)
            self._take(self._plan.memories[value], self._storage(value))
        self._held.pop(value, None)


def _plain(memory: Memory) -> torch.UntypedStorage:
    if memory.outside:
        return memory.storage
    # Zeros, where plainly there would be whatever was in memory: then all ranks have the same.
    made = torch.zeros(memory.nbytes, dtype=torch.uint8, device=memory.device)
    return made.untyped_storage()


def _mapped(entry: Operation, real: Callable[[Any], Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    args: tuple[Any, ...] = tuple(pytree.tree_map(real, list(entry.args)))
    kwargs: dict[str, Any] = pytree.tree_map(real, entry.kwargs)
    return args, kwargs


def _written(entry: Operation | Reseed) -> frozenset[int]:
    return frozenset() if isinstance(entry, Reseed) else entry.writes


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
