"""The numbers of a plan, and of the candidates of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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
class PlanData:
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
        """The ZeRO stage: ``"off"``, ``"stage 2"`` or ``"stage 2, non-distributed"``."""
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
    plan: PlanData | None = field(repr=False)
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
