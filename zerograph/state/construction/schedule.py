"""Select and order the entries of a program to run, and find how long each value lives.

All draws run, in their order: each advances the generator, even if its result is overwritten later. Other entries run
only if a wanted value depends on them, and as soon as their inputs exist. A copy of a whole model (in another dtype, or
of a teacher for its student) is thereby made parameter by parameter, without all parameters in memory at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zerograph.state.construction.program import Operation, Program, Reseed


@dataclass(frozen=True, eq=False)
class Step:
    """One entry of the program to run, by number; ``ends`` are the values whose last use it is."""

    number: int
    ends: tuple[int, ...]


def schedule(program: Program, wanted: Collection[int], draws_from: int) -> tuple[Step, ...]:
    """Return the steps that compute the current values of the memories ``wanted``, in order.

    Args:
        draws_from: number of the first entry from which on every draw runs, even if its result is unused, and every
            entry without a result, such as an assertion.
    """
    kept = {number for number in range(draws_from, len(program.entries)) if _has_effects(program.entries[number])}
    end = len(program.entries)
    # Pairs of a value and the entry that needs it as it is before that entry.
    needs = [(program.current[memory], end) for memory in wanted]
    needs += [(value, number) for number in kept for value in program.uses[number].reads | program.uses[number].changes]
    # By value: the latest entry whose needs have been followed.
    visited: dict[int, int] = {}
    while needs:
        value, limit = needs.pop()
        if visited.get(value, -1) >= limit:
            continue
        visited[value] = limit
        for number in program.writers[value]:
            entry = program.entries[number]
            if number < limit and number not in kept and not (isinstance(entry, Operation) and entry.allocates):
                kept.add(number)
                use = program.uses[number]
                needs += [(operand, number) for operand in use.reads | use.changes]
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
    """Return sort keys that place each entry after its dependencies; entries without a draw as early as possible."""
    # By value: the last entry that wrote it, and the entries that have read it since.
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    places: dict[int, tuple[int, int]] = {}
    for number in kept:
        entry, use = program.entries[number], program.uses[number]
        dependencies = {last_writer[value] for value in use.reads | use.changes if value in last_writer}
        dependencies |= {reader for value in use.changes for reader in readers.get(value, ())}
        fixed = isinstance(entry, Reseed) or entry.generator is not None or not dependencies
        places[number] = number if fixed else max(places[dependency][0] for dependency in dependencies), number
        for value in use.reads:
            readers.setdefault(value, []).append(number)
        for value in use.makes | use.changes:
            last_writer[value], readers[value] = number, []
    return places
