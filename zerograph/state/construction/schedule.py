"""What of a program has to be done, in which order, and how long each value lives.

Draws keep their order, and none is left out: each moves the generator on, even where another overwrites its result.
Everything else is done only if something of it remains, and as soon as what it reads is there: then a copy of a whole
model in another dtype, or of a teacher for its student, is made parameter by parameter, and not while all of them wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zerograph.state.construction.program import Operation, Program, Reseed


@dataclass(frozen=True, eq=False)
class Step:
    """An entry of the program by its number; ``ends`` are the values that nobody touches after it."""

    number: int
    ends: tuple[int, ...]


def schedule(program: Program, wanted: Collection[int], draws_from: int) -> tuple[Step, ...]:
    """What has to be done for the memories ``wanted`` to be as they are now, in order.

    Args:
        draws_from: from the entry of this number on all random numbers are drawn, whatever becomes of them; and what
            returns nothing, and is there to raise if something is wrong, is done.
    """
    kept = {number for number in range(draws_from, len(program.entries)) if _has_effects(program.entries[number])}
    end = len(program.entries)
    # A value, and the entry that needs it as it is before it.
    needs = [(program.current[memory], end) for memory in wanted]
    needs += [(value, number) for number in kept for value in program.uses[number].reads | program.uses[number].changes]
    known: dict[int, int] = {}
    while needs:
        value, limit = needs.pop()
        if known.get(value, -1) >= limit:
            continue
        known[value] = limit
        for number in program.writers[value]:
            entry = program.entries[number]
            if number < limit and number not in kept and not (isinstance(entry, Operation) and entry.allocates):
                kept.add(number)
                use = program.uses[number]
                needs += [(one, number) for one in use.reads | use.changes]
    return _ordered(program, sorted(kept))


def _has_effects(entry: Operation | Reseed) -> bool:
    return isinstance(entry, Reseed) or entry.generator is not None or not (entry.makes or entry.writes)


def _ordered(program: Program, kept: Sequence[int]) -> tuple[Step, ...]:
    places = _places(program, kept)
    order = sorted(kept, key=places.__getitem__)
    last: dict[int, int] = {}
    for number in order:
        use = program.uses[number]
        last |= dict.fromkeys(use.reads | use.changes | use.makes, number)
    ends: dict[int, list[int]] = {}
    for value, number in last.items():
        ends.setdefault(number, []).append(value)
    return tuple(Step(number, tuple(sorted(ends.get(number, ())))) for number in order)


def _places(program: Program, kept: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Sorted by these, every entry comes after what it depends on, and what draws nothing as soon as it can."""
    # By value: the last entry that wrote it, and those that have read it since.
    wrote: dict[int, int] = {}
    read: dict[int, list[int]] = {}
    places: dict[int, tuple[int, int]] = {}
    for number in kept:
        entry, use = program.entries[number], program.uses[number]
        before = {wrote[value] for value in use.reads | use.changes if value in wrote}
        before |= {one for value in use.changes for one in read.get(value, ())}
        fixed = isinstance(entry, Reseed) or entry.generator is not None or not before
        places[number] = number if fixed else max(places[one][0] for one in before), number
        for value in use.reads:
            read.setdefault(value, []).append(number)
        for value in use.makes | use.changes:
            wrote[value], read[value] = number, []
    return places
