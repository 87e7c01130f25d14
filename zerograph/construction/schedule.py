"""What of a program has to be done, in which order, and how long each value lives.

A *value* is what a memory holds from one overwriting to the next. Draws keep their order, and none is left out: each
moves the generator on, even where another overwrites its result. Everything else is done only if something of it
remains, and as soon as what it reads is there: then a copy of a whole model in another dtype, or of a teacher for its
student, is made parameter by parameter, and not while all of them wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from zerograph.construction.program import Operation, Program, Reseed


@dataclass(frozen=True, eq=False)
class Step:
    """An entry of the program and, for an operation, which value stands in each memory that it touches.

    Attributes:
        number: of the entry in the program.
        ends: values that nobody touches after it.
    """

    number: int
    entry: Operation | Reseed
    values: Mapping[int, int]
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps in order; by value its memory, and by memory the value that it holds at the end."""

    steps: tuple[Step, ...]
    memories: tuple[int, ...]
    final: Mapping[int, int]


@dataclass(eq=False)
class _Use:
    """What an operation does with values."""

    reads: set[int]
    changes: set[int]
    makes: set[int]


def schedule(program: Program, wanted: Collection[int], *, draws: bool) -> Schedule:
    """What has to be done for the memories ``wanted`` to be as they are at the end of the program.

    Args:
        draws: all random numbers are drawn, whether or not something becomes of them.
    """
    values, uses, memories, final = _values(program)
    kept: set[int] = set()
    live = {final[memory] for memory in wanted if memory in final}
    for number in reversed(range(len(program.entries))):
        entry, use = program.entries[number], uses[number]
        if isinstance(entry, Reseed):
            kept |= {number} if draws else set()
        elif not entry.allocates and (
            (draws and entry.generator is not None)
            or (use.makes | use.changes) & live
            # What returns nothing is there to raise if something is wrong.
            or (not (use.makes or use.changes) and draws)
        ):
            kept.add(number)
            live |= use.reads | use.changes
    order = sorted(kept, key=_places(program, uses, sorted(kept)).__getitem__)
    last: dict[int, int] = {}
    for number in order:
        last |= dict.fromkeys(uses[number].reads | uses[number].changes | uses[number].makes, number)
    ends: dict[int, list[int]] = {}
    for value, number in last.items():
        ends.setdefault(number, []).append(value)
    steps = tuple(Step(n, program.entries[n], values[n], tuple(ends.get(n, ()))) for n in order)
    return Schedule(steps, tuple(memories), final)


def _values(program: Program) -> tuple[list[dict[int, int]], list[_Use], list[int], dict[int, int]]:
    """For each entry the value in each memory that it touches, and what it does with them; each value's memory; and
    the value that each memory holds at the end."""
    memories: list[int] = []
    current: dict[int, int] = {}

    def new(memory: int) -> int:
        memories.append(memory)
        current[memory] = len(memories) - 1
        return current[memory]

    for memory in program.memories:
        if memory.outside:
            new(memory.number)
    found: list[dict[int, int]] = []
    uses: list[_Use] = []
    for entry in program.entries:
        if isinstance(entry, Reseed):
            found.append({})
            uses.append(_Use(set(), set(), set()))
            continue
        reads = {current[memory] for memory in entry.reads}
        changes = {current[memory] for memory in entry.writes - entry.overwrites}
        makes = {new(memory) for memory in sorted(entry.overwrites | entry.makes)}
        found.append({memory: current[memory] for memory in entry.reads | entry.writes | entry.makes})
        uses.append(_Use(reads, changes, makes))
    return found, uses, memories, current


def _places(program: Program, uses: list[_Use], kept: list[int]) -> dict[int, tuple[int, int]]:
    """Sorted by these, every entry comes after what it depends on, and those that draw nothing as soon as they can."""
    wrote: dict[int, list[int]] = {}
    read: dict[int, list[int]] = {}
    places: dict[int, tuple[int, int]] = {}
    for number in kept:
        entry, use = program.entries[number], uses[number]
        before = {one for value in use.reads | use.changes for one in wrote.get(value, ())}
        before |= {one for value in use.changes for one in read.get(value, ())}
        fixed = isinstance(entry, Reseed) or entry.generator is not None or not before
        places[number] = number if fixed else max(places[one][0] for one in before), number
        for value in use.makes | use.changes:
            # Who comes after the last that changes it comes after all before that.
            wrote[value], read[value] = [number], []
        for value in use.reads:
            read.setdefault(value, []).append(number)
    return places
