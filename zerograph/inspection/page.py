"""A step on a screen: short however deep the model is. What is left out is in ``describe()``."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterable, Sequence

from zerograph.base.sizes import show_bytes
from zerograph.inspection.collectives import short
from zerograph.inspection.summary import Placed, Sent, Summary

# As many rows as a section may take.
_ROWS = 6
# A space at which no line is broken.
_TIGHT = "\0"


def page(found: Summary) -> str:
    """The summary in some twenty lines."""
    parts = [_traced(found), _placed(found), _sent(found), _memory(found), _warnings(found.warnings)]
    return "\n".join(line for part in parts for line in part)


def _traced(found: Summary) -> list[str]:
    micro = f", {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    counts = f"{found.nodes_captured:,} nodes, {found.nodes:,} to run{micro}"
    values = [f"    {one.name:<9} {one}" for one in (*found.inputs[:_ROWS], *found.outputs[:_ROWS])]
    if (more := len(found.inputs) + len(found.outputs) - len(values)) > 0:
        values.append(f"    and {more} more")
    return [f"  traced: {counts} ({found.seconds:.1f} s)", *values]


def _placed(found: Summary) -> list[str]:
    numel = sum(one.numel for one in found.buckets)
    lines = [f"  placed: {numel:,} parameters in {_count(len(found.buckets), 'bucket')}"]
    alike = _alike(found.buckets)
    lines += [line for same in alike[:_ROWS] for line in _bucket_lines(same)]
    if len(alike) > _ROWS:
        lines.append(f"    and {_count(sum(map(len, alike[_ROWS:])), 'bucket')} of {len(alike) - _ROWS} other kinds")
    if found.plain:
        lines.append(f"    in no bucket, whole on every rank: {short(found.plain)}")
    return lines


def _alike(buckets: Sequence[Placed]) -> list[list[Placed]]:
    """Few buckets one by one, many by kind."""
    if len(buckets) <= _ROWS:
        return [[one] for one in buckets]
    found: dict[Hashable, list[Placed]] = {}
    for one in buckets:
        key = one.sbp, one.gradient, tuple(one.state.items()), one.dtype, one.compute_dtype, one.rests, one.how
        found.setdefault(key, []).append(one)
    return list(found.values())


def _bucket_lines(same: Sequence[Placed]) -> list[str]:
    first = same[0]
    names = first.name if len(same) == 1 else f"{first.name} ... {same[-1].name} ({len(same)})"
    parameters = [name for one in same for name in one.parameters]
    dtype = first.dtype if first.dtype == first.compute_dtype else f"{first.dtype} as {first.compute_dtype}"
    placed = [f"{dtype} {first.sbp}"]
    if first.gradient is not None:
        placed.append(f"gradient {first.gradient}")
        # Step counts are whole everywhere: of that there is nothing to say where anything else is split.
        states = dict.fromkeys(first.state.values())
        split = [one for one in states if "S" in one]
        placed += [f"state {', '.join(split or states)}"] if states else []
    if first.rests:
        placed.append(first.rests)
    size = show_bytes(sum(one.bytes for one in same))
    how = f"{first.optimizer or 'no update'}{', dealt out whole' if first.dealt else ''}"
    return [
        f"    {names}: {'; '.join(placed)}; {size} here; {how}",
        f"      {short(parameters)}",
    ]


def _sent(found: Summary) -> list[str]:
    if not found.sent:
        return ["  collectives: none"]
    times = sum(one.times for one in found.sent)
    lines = [f"  collectives: {times:,} per step, each rank sends {_bytes(found.bytes_sent)}"]
    for phase in dict.fromkeys(one.phase for one in found.sent):
        lines.append(f"    {phase:<9} {'; '.join(map(_kind, (one for one in found.sent if one.phase == phase)))}")
    return lines


def _kind(one: Sent) -> str:
    return f"{one.times:,} {one.kind} {show_bytes(one.bytes)}"


def _memory(found: Summary) -> list[str]:
    memory = found.memory
    where = " ".join(filter(None, (memory.where.phase, memory.where.module, memory.where.source)))
    return [
        f"  memory of this rank: {show_bytes(memory.peak)} at the peak (predicted), "
        f"{show_bytes(memory.at_rest)} between steps",
        *_wrapped("    peak      ", _kinds(memory.kinds.items())),
        *_wrapped("              ", f"at {memory.node}: {where}"),
        *_wrapped("    at rest   ", _kinds(found.at_rest.items()) or "nothing"),
        *([f"    {found.recompute}"] if found.recompute else []),
    ]


def _wrapped(head: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, 80, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    return [line.replace(_TIGHT, " ") for line in lines]


def _kinds(kinds: Iterable[tuple[str, int]]) -> str:
    # A number stays with its unit.
    return ", ".join(f"{name} {show_bytes(count)}".replace(" ", _TIGHT) for name, count in kinds)


def _warnings(warnings: Sequence[str]) -> list[str]:
    if not warnings:
        return ["  warnings: none"]
    lines = [f"  warnings: {len(warnings)}"]
    for one in warnings[:_ROWS]:
        lines += [f"    {line}" for line in one.splitlines()]
    return [*lines, f"    and {len(warnings) - _ROWS} more"] if len(warnings) > _ROWS else lines


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({show_bytes(count)})" if count >= 1024 else show_bytes(count)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
