"""A step as text: on one screen (:func:`page`), or in full (:func:`description`)."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterable, Sequence

from zerograph.base.sizes import show_bytes
from zerograph.compiler.compiled import PreparedStep
from zerograph.inspection.collectives import collectives, short
from zerograph.inspection.summary import Placed, Sent, Summary, summary
from zerograph.inspection.text import show_shape
from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta
from zerograph.ir.sbp import show
from zerograph.ir.slots import Slot
from zerograph.ir.step_graph import placeholders

# Rows of a section of the page, at most.
_ROWS = 6
# A space at which no line is broken.
_TIGHT = "\0"


def page(step: Summary) -> str:
    """Show a step in some twenty lines, however deep the model is."""
    parts = [_traced(step), _sizes(step), _placed(step), _sent(step), _memory(step), _warnings(step.warnings)]
    return "\n".join(line for part in parts for line in part)


def _traced(step: Summary) -> list[str]:
    micro = f", {step.micro_batches} micro-batches" if step.micro_batches > 1 else ""
    counts = f"{step.nodes_captured:,} nodes, {step.nodes:,} to run{micro}"
    values = [f"    {value.name:<9} {value}" for value in (*step.inputs[:_ROWS], *step.outputs[:_ROWS])]
    if (more := len(step.inputs) + len(step.outputs) - len(values)) > 0:
        values.append(f"    and {more} more")
    return [f"  traced: {counts} ({step.seconds:.1f} s)", *values]


def _sizes(step: Summary) -> list[str]:
    """Show the sizes that the bytes of a step with dynamic dimensions hold for."""
    return [f"    bytes are for {step.memory.validity}"] if step.memory.sizes else []


def _placed(step: Summary) -> list[str]:
    numel = sum(bucket.numel for bucket in step.buckets)
    lines = [f"  placed: {numel:,} parameters in {_count(len(step.buckets), 'bucket')}"]
    groups = _groups(step.buckets)
    lines += [line for group in groups[:_ROWS] for line in _bucket_lines(group)]
    if len(groups) > _ROWS:
        lines.append(f"    and {_count(sum(map(len, groups[_ROWS:])), 'bucket')} of {len(groups) - _ROWS} other kinds")
    if step.plain:
        lines.append(f"    in no bucket, whole on every rank: {short(step.plain)}")
    return lines


def _groups(buckets: Sequence[Placed]) -> list[list[Placed]]:
    """List few buckets one by one, many buckets by kind."""
    if len(buckets) <= _ROWS:
        return [[bucket] for bucket in buckets]
    groups: dict[Hashable, list[Placed]] = {}
    for bucket in buckets:
        state = tuple(bucket.state.items())
        key = bucket.sbp, bucket.gradient, state, bucket.dtype, bucket.compute_dtype, bucket.location, bucket.how
        groups.setdefault(key, []).append(bucket)
    return list(groups.values())


def _bucket_lines(group: Sequence[Placed]) -> list[str]:
    first = group[0]
    names = first.name if len(group) == 1 else f"{first.name} ... {group[-1].name} ({len(group)})"
    parameters = [name for bucket in group for name in bucket.parameters]
    dtype = first.dtype if first.dtype == first.compute_dtype else f"{first.dtype} as {first.compute_dtype}"
    placed = [f"{dtype} {first.sbp}"]
    if first.gradient is not None:
        placed.append(f"gradient {first.gradient}")
        # Step counts are always whole: not worth a word where other state is split.
        states = dict.fromkeys(first.state.values())
        split = [sbp for sbp in states if "S" in sbp]
        placed += [f"state {', '.join(split or states)}"] if states else []
    if first.location:
        placed.append(first.location)
    size = show_bytes(sum(bucket.bytes for bucket in group))
    how = f"{first.optimizer or 'no update'}{', dealt out whole' if first.has_owners else ''}"
    return [f"    {names}: {'; '.join(placed)}; {size} here; {how}", f"      {short(parameters)}"]


def _sent(step: Summary) -> list[str]:
    if not step.sent:
        return ["  collectives: none"]
    times = sum(sent.times for sent in step.sent)
    between = f", {_bytes(step.bytes_between)} of them to other hosts" if step.bytes_between else ""
    lines = [f"  collectives: {times:,} per step, each rank sends {_bytes(step.bytes_sent)}{between}"]
    for phase in dict.fromkeys(sent.phase for sent in step.sent):
        lines.append(f"    {phase:<9} {'; '.join(map(_kind, (sent for sent in step.sent if sent.phase == phase)))}")
    return lines


def _kind(sent: Sent) -> str:
    return f"{sent.times:,} {sent.kind} {show_bytes(sent.bytes)}"


def _memory(step: Summary) -> list[str]:
    memory = step.memory
    where = " ".join(filter(None, (memory.where.phase, memory.where.module, memory.where.source)))
    return [
        f"  memory of this rank: {show_bytes(memory.peak)} at the peak (predicted), "
        f"{show_bytes(memory.at_rest)} between steps",
        *_wrapped("    peak      ", _kinds(memory.kinds.items())),
        *_wrapped("              ", f"at {memory.node}: {where}"),
        *_wrapped("    stored    ", _kinds(step.at_rest.items()) or "nothing"),
        *([f"    {step.recompute}"] if step.recompute else []),
    ]


def _wrapped(head: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, 80, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    return [line.replace(_TIGHT, " ") for line in lines]


def _kinds(kinds: Iterable[tuple[str, int]]) -> str:
    # A number and its unit stay on one line.
    return ", ".join(f"{name} {show_bytes(count)}".replace(" ", _TIGHT) for name, count in kinds)


def _warnings(warnings: Sequence[str]) -> list[str]:
    if not warnings:
        return ["  warnings: none"]
    lines = [f"  warnings: {len(warnings)}"]
    for warning in warnings[:_ROWS]:
        lines += [f"    {line}" for line in warning.splitlines()]
    return [*lines, f"    and {len(warnings) - _ROWS} more"] if len(warnings) > _ROWS else lines


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({show_bytes(count)})" if count >= 1024 else show_bytes(count)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def description(step: PreparedStep) -> str:
    """Show a step section by section: every input, output, parameter, collective and pass, one per line."""
    numbers = summary(step)
    kinds = ", ".join(f"{kind} {show_bytes(count)}" for kind, count in numbers.at_rest.items())
    parts = [
        _section("inputs", [f"{value.name} {value}" for value in numbers.inputs]),
        _section("outputs", [f"{value.name} {value}" for value in numbers.outputs]),
        _section("parameters between steps", _parameter_lines(step, numbers)),
        _section("collectives", _collective_lines(step, numbers)),
        _section("recompute", [numbers.recompute] if numbers.recompute else []),
        _section("memory of this rank", [f"predicted peak: {numbers.memory}", f"between steps: {kinds}"]),
        _section("warnings", [line for warning in numbers.warnings for line in warning.splitlines()]),
        _section("passes", [f"{each.name:<24} {each.nodes:>6} nodes {each.seconds:>8.3f} s" for each in step.passes]),
    ]
    return "\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"  {title}:", *(f"    {line}" for line in lines or ["none"])])


def _parameter_lines(step: PreparedStep, numbers: Summary) -> list[str]:
    lines = []
    for bucket, placed in zip(step.context.buckets, numbers.buckets, strict=True):
        lines.append(_bucket_line(bucket, placed))
        owners = [""] * len(bucket.slots) if bucket.owners is None else [f"  rank {rank}" for rank in bucket.owners]
        lines += [
            f"  {slot.name} {show_shape(slot.shape)}{_split(bucket, slot)}{owner}"
            for slot, owner in zip(bucket.slots, owners, strict=True)
        ]
    for node in placeholders(step.emitted, "parameter"):
        lines.append(f"{meta(node)['role'].name} {show_shape(meta(node)['global'])} B, in no bucket")
    stored = sum(numbers.at_rest.get(kind, 0) for kind in ("parameters", "optimizer state"))
    lines.append(f"{stored:,} bytes of parameters and optimizer state on this rank")
    return lines


def _bucket_line(bucket: Bucket, placed: Placed) -> str:
    dtype = str(bucket.dtype) if bucket.compute_dtype is None else f"{bucket.dtype} as {bucket.compute_dtype}"
    location = f", {placed.location}" if placed.location else ""
    return (
        f"{bucket.name} {placed.sbp}  {bucket.numel * (bucket.rows or 1):,} elements, {dtype}{location}  ({placed.how})"
    )


def _split(bucket: Bucket, slot: Slot) -> str:
    """Show the SBP of a parameter that the user has split; the SBP of its bucket of rows does not tell it."""
    return f" {show(bucket.sbp_of(slot))}" if slot.split else ""


def _collective_lines(step: PreparedStep, numbers: Summary) -> list[str]:
    lines = [
        f"{collective}{f', {times} times' if times > 1 else ''}"
        for collective, times in collectives(step.emitted, step.context)
    ]
    between = f", {numbers.bytes_between:,} of them to other hosts" if numbers.bytes_between else ""
    return [*lines, f"{numbers.bytes_sent:,} bytes sent by each rank per step{between}"] if lines else []
