"""A step in full: every input, output, parameter, collective and pass, a line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerograph.compiler.compiled import RewrittenStep
from zerograph.inspection.collectives import collectives
from zerograph.inspection.summary import Placed, Summary, summary
from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.memory import show_bytes
from zerograph.ir.metadata import meta, role
from zerograph.ir.sbp import show
from zerograph.ir.step_graph import placeholders


def description(step: RewrittenStep) -> str:
    """The step section by section."""
    found = summary(step)
    parts = [
        _section("inputs", [f"{one.name} {one}" for one in found.inputs]),
        _section("outputs", [f"{one.name} {one}" for one in found.outputs]),
        _section("parameters at rest", _parameters(step, found)),
        _section("collectives", _collectives(step, found)),
        _section("recompute", [found.recompute] if found.recompute else []),
        _section("memory of this rank", _memory(found)),
        _section("warnings", [line for one in found.warnings for line in one.splitlines()]),
        _section("passes", [f"{one.name:<24} {one.nodes:>6} nodes {one.seconds:>8.3f} s" for one in step.passes]),
    ]
    return "\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"  {title}:", *(f"    {line}" for line in lines or ["none"])])


def _parameters(step: RewrittenStep, found: Summary) -> list[str]:
    lines = []
    for bucket, placed in zip(step.context.buckets, found.buckets, strict=True):
        lines.append(_bucket(bucket, placed))
        owners = [""] * len(bucket.slots) if bucket.owners is None else [f"  rank {one}" for one in bucket.owners]
        lines += [
            f"  {slot.name} {_shape(slot.shape)}{_cut(bucket, slot)}{owner}"
            for slot, owner in zip(bucket.slots, owners, strict=True)
        ]
    plain = [(node, one) for node in placeholders(step.emitted, "parameter") if (one := role(node)) is not None]
    lines += [f"{one.name} {_shape(meta(node)['global'])} B, in no bucket" for node, one in plain]
    at_rest = sum(found.at_rest.get(kind, 0) for kind in ("parameters", "optimizer state"))
    lines.append(f"{at_rest:,} bytes of parameters and optimizer state on this rank")
    return lines


def _bucket(bucket: Bucket, placed: Placed) -> str:
    dtype = str(bucket.dtype) if bucket.compute_dtype is None else f"{bucket.dtype} as {bucket.compute_dtype}"
    numel = bucket.numel * (bucket.rows or 1)
    rests = f", {placed.rests}" if placed.rests else ""
    return f"{bucket.name} {placed.sbp}  {numel:,} elements, {dtype}{rests}  ({placed.how})"


def _cut(bucket: Bucket, slot: Slot) -> str:
    """How the user has split a parameter, which its bucket of rows does not tell."""
    return "" if slot.split is None else f" {show(bucket.sbp_of(slot))}"


def _collectives(step: RewrittenStep, found: Summary) -> list[str]:
    lines = [
        f"{one}{f', {times} times' if times > 1 else ''}"
        for one, times in collectives(step.emitted, step.context.buckets)
    ]
    return [*lines, f"{found.bytes_sent:,} bytes sent by each rank per step"] if lines else []


def _memory(found: Summary) -> list[str]:
    return [
        f"predicted peak: {found.memory}",
        f"between steps: {', '.join(f'{kind} {show_bytes(count)}' for kind, count in found.at_rest.items())}",
    ]


def _shape(shape: Iterable[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
