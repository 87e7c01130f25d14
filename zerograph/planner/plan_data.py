"""The numbers of a plan and of the candidates of a search, and their tables for a terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zerograph.base.sizes import show_bytes, show_seconds
from zerograph.compiler.memory_search import remedies
from zerograph.inspection.step import Prepared
from zerograph.ir.memory import Memory, Profile
from zerograph.planner.closed_form import ModelStates
from zerograph.planner.timeline import Timeline


@dataclass(frozen=True)
class Wire:
    """Bytes that a rank sends in a step by collectives of one kind in one phase.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce, all-to-all or shift.
        mesh_dim: dimension of the mesh along which they run.
        times: number of runs per step.
        bytes: bytes that each rank sends in all of them.
    """

    kind: str
    phase: str
    mesh_dim: int
    times: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The predicted step of one rank.

    Attributes:
        mesh: shape of the grid of ranks.
        options: the configuration: mode and stage, and all options that are not the default.
        precision: ``"fp32"``, ``"bf16 with fp32 masters"``, ...
        machine: name of the machine; ``capacity`` is the memory of one of its devices in bytes, of which ``headroom``
            stays free.
        parameters: number of elements of the model.
        at_rest: bytes between steps, by kind: parameters (masters in mixed precision), optimizer state, buffers.
        most: maximum bytes of each kind at any moment of the step.
        model_states: bytes as the ZeRO paper counts them, the maximum of each: parameters in the compute dtype,
            gradients in buckets, and optimizer state with masters; see :mod:`zerograph.planner.closed_form`.
        memory: peak on the device: its parts, and where in the step it is reached.
        host: the same for the CPU's memory, for a step of an accelerator; ``cpu_capacity`` is the CPU memory per rank
            in bytes, None if it is not known.
        in_files: bytes that are stored in files.
        profile: memory over the step, node by node.
        wire: bytes sent.
        time: the step's time and its parts.
        samples: size of dimension 0 of a rank's part of the batch.
        tokens: number of elements of the first integer tensor [samples, ...] of a rank's part of the batch; None if it
            has none.
        operations: floating-point operations of a rank's products in a step.
        model_operations: the same without recomputation.
        peak_rate: operations per second of the device's data sheet in this precision; None if it is not known.
        length: number of positions of the sequences that a rank passes; None if no input is a sequence.
        context_parallel: number of ranks that split each of these sequences, and so share samples and tokens.
        longer: why sequences are not longer, in the plan of the longest ones that fit; else empty.
        prepared: the compiled step.
        compile_seconds: duration of compilation on this machine.
        alternatives: all candidates of the search that chose this plan, with verdicts.
    """

    mesh: tuple[int, ...]
    options: str
    precision: str
    machine: str
    capacity: int
    headroom: int
    parameters: int
    at_rest: Mapping[str, int]
    most: Mapping[str, int]
    model_states: ModelStates
    memory: Memory
    host: Memory | None
    cpu_capacity: int | None
    in_files: int
    profile: Profile = field(repr=False)
    wire: Sequence[Wire]
    time: Timeline
    samples: int
    tokens: int | None
    operations: int
    model_operations: int
    peak_rate: float | None
    prepared: Prepared = field(repr=False)
    compile_seconds: float
    length: int | None = None
    context_parallel: int = 1
    longer: str = ""
    alternatives: Sequence[Candidate] = field(default=(), repr=False)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh)

    @property
    def stage(self) -> str:
        """The ZeRO stage: ``"off"``, ``"stage 2"`` or ``"stage 2, whole parameters"``."""
        return self.prepared.context.policy.name

    @property
    def fits(self) -> bool:
        """True if the peak leaves the headroom free and offloaded state fits into the CPU's memory."""
        return self.memory.peak <= self.usable and self.host_fits

    @property
    def usable(self) -> int:
        """Bytes of the device's memory for the tensors of a step: its capacity without the headroom."""
        return max(0, self.capacity - self.headroom)

    @property
    def host_fits(self) -> bool:
        """True if offloaded state fits into the CPU's memory."""
        return self.host is None or self.cpu_capacity is None or self.host.peak <= self.cpu_capacity

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in a step."""
        return sum(sent.bytes for sent in self.wire)

    @property
    def efficiency(self) -> float:
        """Return the share of the step's time in which the device computes."""
        return self.time.compute / self.time.seconds if self.time.seconds else 1.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second of each device."""
        return self._of_each_device(self.samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of each device; None if the batch has none."""
        return None if self.tokens is None else self._of_each_device(self.tokens)

    def _of_each_device(self, count: int) -> float:
        return count / self.context_parallel / self.time.seconds if self.time.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model-flops utilisation: products of the model, without recomputation, as a share of the data sheet's peak.

        The attention scores that backward recomputes do not count.
        """
        if self.peak_rate is None or not self.time.seconds:
            return None
        return self.model_operations / self.time.seconds / self.peak_rate

    def __str__(self) -> str:
        return text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON, in bytes and seconds."""
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        peak, time, host = numbers.pop("memory"), numbers.pop("time"), self.host
        parts = ("compute", "communication", "exposed", "transfers", "updating")
        return {
            **numbers,
            **{name: getattr(self, name) for name in _DERIVED},
            "mesh": list(self.mesh),
            "model_states": asdict(self.model_states),
            "peak": {"bytes": peak.peak, "kinds": dict(peak.kinds), "at": asdict(peak.where)},
            "sizes": dict(peak.sizes),
            "host": host and {"bytes": host.peak, "at_rest": host.at_rest, "kinds": dict(host.kinds)},
            "wire": [asdict(sent) for sent in self.wire],
            "seconds": {"step": time.seconds, **{part: getattr(time, part) for part in parts}, **time.phases},
            "alternatives": [each.as_dict() for each in self.alternatives],
        }


# Properties that as_dict() has beside the fields.
_DERIVED = (
    *("world_size", "stage", "fits", "wire_bytes"),
    *("samples_per_second", "tokens_per_second", "mfu", "efficiency"),
)


@dataclass(frozen=True)
class Candidate:
    """One configuration that a search tried.

    Attributes:
        stage: ``"off"``, ``"1"``, ``"2"`` or ``"3"``.
        mesh: shape of the grid of ranks.
        trade_offs: options that trade time for memory: ``"recompute"``, ``"optimizer on the CPU, 4 micro-batches"``, or
            empty.
        plan: its plan; None if it was not compiled.
        verdict: the reason why it is chosen, or not.
        options: the options that the search set.
    """

    stage: str
    mesh: tuple[int, ...]
    trade_offs: str
    plan: Plan | None = field(repr=False)
    verdict: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate for JSON: peak in bytes, and seconds; both None if it was not compiled."""
        return {
            "stage": self.stage,
            "mesh": list(self.mesh),
            "trade_offs": self.trade_offs,
            "peak": None if self.plan is None else self.plan.memory.peak,
            "seconds": None if self.plan is None else self.plan.time.seconds,
            "verdict": self.verdict,
        }


def text(plan: Plan, width: int = 100) -> str:
    """Return a plan as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(page(plan))
    shown = console.file
    assert isinstance(shown, io.StringIO)
    return shown.getvalue().rstrip()


def page(plan: Plan) -> RenderableType:
    """Return a plan on a page: title, memory, traffic, time, and the candidates of the search."""
    grid = "x".join(map(str, plan.mesh))
    head = Text(f"{plan.parameters:,} parameters on {grid} ranks, each on {plan.machine}, in {plan.precision}")
    head.append(f"\n{plan.options}", style="dim")
    if plan.longer:
        head.append(f"\nsequences of {plan.length:,} positions; {plan.longer}")
    if plan.memory.sizes:
        head.append(f"\nall numbers are for inputs of {plan.memory.validity}")
    parts: list[RenderableType] = [head, _memory(plan), _wire(plan), _time(plan)]
    if plan.alternatives:
        parts.append(candidates(plan.alternatives))
    return Group(*parts)


def _memory(plan: Plan) -> RenderableType:
    table = _table("memory of a rank", "stored", "maximum", "at the peak")
    for kind in dict.fromkeys([*plan.memory.kinds, *plan.most]):
        cells = (plan.at_rest.get(kind, 0), plan.most.get(kind, 0), plan.memory.kinds.get(kind, 0))  # type: ignore[call-overload]
        table.add_row(kind, *(show_bytes(count) if count else "" for count in cells))
    fits = "fits" if plan.memory.peak <= plan.usable else "does not fit"
    table.add_section()
    table.add_row("together", show_bytes(plan.memory.at_rest), "", show_bytes(plan.memory.peak))
    where = plan.memory.where
    place = ", ".join(filter(None, (where.phase, where.module)))
    room = show_bytes(plan.capacity)
    if plan.headroom:
        room = f"{show_bytes(plan.usable)} ({room} less a headroom of {show_bytes(plan.headroom)})"
    verdict = f"{fits} into {room}; the peak is in {place}"
    lines: list[RenderableType] = [table, Text(verdict, style="green" if plan.fits else "bold red")]
    if plan.memory.peak > plan.usable:
        lines.append(Text(f"What would help: {'; '.join(remedies(plan.memory, plan.prepared.context))}."))
    if plan.host is not None and plan.host.peak >= _WORTH_A_LINE:
        room = "" if plan.cpu_capacity is None else f", of {show_bytes(plan.cpu_capacity)}"
        bytes_used = f"{show_bytes(plan.host.at_rest)} stored, {show_bytes(plan.host.peak)} at the peak{room}"
        lines.append(Text(f"in the CPU's memory: {bytes_used}", style="" if plan.host_fits else "bold red"))
    if plan.in_files:
        lines.append(Text(f"in files: {show_bytes(plan.in_files)}"))
    return Group(*lines)


# Step counts are always on the CPU.
_WORTH_A_LINE = 2**14


def _wire(plan: Plan) -> RenderableType:
    table = _table("sent by a rank in a step", "times", "bytes")
    for sent in plan.wire:
        along = f" along {sent.mesh_dim}" if len(plan.mesh) > 1 else ""
        table.add_row(f"{sent.phase}: {sent.kind}{along}", f"{sent.times:,}", show_bytes(sent.bytes))
    table.add_section()
    table.add_row("together", "", show_bytes(plan.wire_bytes))
    return table


def _time(plan: Plan) -> RenderableType:
    table = _table("time of a step", "time", "share")
    whole = plan.time.seconds or 1.0
    for activity, seconds in (
        ("computing", plan.time.compute),
        ("waiting for collectives", plan.time.exposed),
        ("waiting for transfers", plan.time.transfers),
        *([("waiting for the CPU's update", plan.time.updating)] if plan.time.updating else ()),
    ):
        table.add_row(activity, show_seconds(seconds), f"{seconds / whole:.1%}")
    table.add_section()
    table.add_row("together", show_seconds(plan.time.seconds), "")
    hidden = max(0.0, plan.time.communication - plan.time.exposed)
    text = f"collectives take {show_seconds(plan.time.communication)}, {show_seconds(hidden)} of it while it computes"
    return Group(table, Text(_speed(plan)), Text(text))


def _speed(plan: Plan) -> str:
    """Return the speed of each device: tokens or samples per second, operations, and the share of its peak."""
    count, unit = plan.samples_per_second, "samples"
    if plan.tokens_per_second is not None:
        count, unit = plan.tokens_per_second, "tokens"
    number = f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
    rate = plan.operations / (plan.time.seconds or 1.0) / 1e12
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    return f"each device: {number} {unit}/s, {rate:.3g} Tflop/s in products{mfu}"


def candidates(tried: Sequence[Candidate]) -> Table:
    """Return a table of the candidates of a search, with verdicts."""
    table = Table("stage", "mesh", "trade-offs", "peak", "time", "verdict", box=box.SIMPLE_HEAD, title_justify="left")
    for each in tried:
        peak = "" if each.plan is None else show_bytes(each.plan.memory.peak)
        seconds = "" if each.plan is None else show_seconds(each.plan.time.seconds)
        style = "bold green" if each.verdict.startswith("the fastest") else ""
        grid = "x".join(map(str, each.mesh))
        table.add_row(each.stage, grid, each.trade_offs, peak, seconds, each.verdict, style=style)
    return table


def _table(*columns: str) -> Table:
    table = Table(columns[0], box=box.SIMPLE_HEAD)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table
