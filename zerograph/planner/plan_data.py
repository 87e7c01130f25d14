"""The numbers of a plan, and of the candidates of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zerograph.inspection.step import Prepared
from zerograph.ir.memory import Memory, Profile
from zerograph.planner.closed_form import ModelStates
from zerograph.planner.timeline import Timeline


@dataclass(frozen=True)
class Wire:
    """What a rank sends in a step by collectives of one kind in one phase.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce or all-to-all.
        mesh_dim: the dimension of the mesh along which they run.
        times: how many.
        bytes: that each rank sends in all of them.
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
        options: the configuration: mode and stage, and what is not the default.
        precision: what it computes in: ``"fp32"``, ``"bf16 with fp32 masters"``.
        machine: name of what it would run on; ``capacity`` is the memory of one of its devices, of which ``headroom``
            stays free.
        parameters: elements of the model.
        at_rest: bytes between steps, by kind: parameters (masters, where they are computed with in less), optimizer
            state, buffers.
        most: the most bytes of each kind at any moment of the step, at rest or not.
        model_states: bytes as the ZeRO paper counts them, each at its most: parameters as they are computed with,
            gradients in buckets, and optimizer state with masters, where there are any; see
            :mod:`zerograph.planner.closed_form`.
        memory: the most bytes at once on the device, what they are, and where.
        host: the same in the CPU's memory, of an accelerator's step; ``cpu_capacity`` is what there is of it for each
            rank, None where that is not known.
        in_files: bytes that rest in files.
        profile: bytes held over the step, node by node.
        wire: what is sent.
        time: the step's time and its parts.
        samples: of a rank's part of the batch: the size of dimension 0.
        tokens: of a rank's part of the batch: the elements of its first tensor of whole numbers that has a dimension
            beside the samples; None where it has none.
        operations: floating-point operations of a rank's products in a step.
        model_operations: those without recomputation.
        peak_rate: operations per second of the device's data sheet in this precision; None where none is known.
        prepared: the compiled step that all of this was read from.
        compile_seconds: what compiling it took here.
        alternatives: what else was tried, and why it lost, where the plan was searched for.
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
    alternatives: Sequence[Candidate] = field(default=(), repr=False)

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    @property
    def stage(self) -> str:
        """``"off"``, ``"stage 2"`` or ``"stage 2, non-distributed"``."""
        return self.prepared.context.policy.name

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the headroom free, and what is offloaded is within the CPU's memory."""
        return self.memory.peak <= self.usable and self.host_fits

    @property
    def usable(self) -> int:
        """Bytes of the device's memory that a step's tensors may take."""
        return max(0, self.capacity - self.headroom)

    @property
    def host_fits(self) -> bool:
        """Whether what is offloaded to the CPU's memory is within that."""
        return self.host is None or self.cpu_capacity is None or self.host.peak <= self.cpu_capacity

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in a step."""
        return sum(one.bytes for one in self.wire)

    @property
    def efficiency(self) -> float:
        """Return the share of the step's time in which the device computes."""
        return self.time.compute / self.time.seconds if self.time.seconds else 1.0

    @property
    def samples_per_second(self) -> float:
        """Samples that each device trains on in a second."""
        return self.samples / self.time.seconds if self.time.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that each device trains on in a second; None where the batch has none."""
        if self.tokens is None:
            return None
        return self.tokens / self.time.seconds if self.time.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model-flops utilisation: the products of the model, nothing recomputed, as a share of the data sheet's peak.

        The scores of attention that its backward recomputes do not count.
        """
        if self.peak_rate is None or not self.time.seconds:
            return None
        return self.model_operations / self.time.seconds / self.peak_rate

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for JSON: bytes, and seconds."""
        return {
            "world_size": self.world_size,
            "mesh": list(self.mesh),
            "stage": self.stage,
            "options": self.options,
            "precision": self.precision,
            "machine": self.machine,
            "capacity": self.capacity,
            "headroom": self.headroom,
            "fits": self.fits,
            "parameters": self.parameters,
            "at_rest": dict(self.at_rest),
            "most": dict(self.most),
            "model_states": asdict(self.model_states),
            "peak": {"bytes": self.memory.peak, "kinds": dict(self.memory.kinds), "at": asdict(self.memory.where)},
            "host": None
            if self.host is None
            else {"bytes": self.host.peak, "at_rest": self.host.at_rest, "kinds": dict(self.host.kinds)},
            "cpu_capacity": self.cpu_capacity,
            "in_files": self.in_files,
            "wire": [asdict(one) for one in self.wire],
            "wire_bytes": self.wire_bytes,
            "seconds": {
                "step": self.time.seconds,
                "compute": self.time.compute,
                "communication": self.time.communication,
                "exposed": self.time.exposed,
                "transfers": self.time.transfers,
                "updating": self.time.updating,
                **self.time.phases,
            },
            "samples": self.samples,
            "tokens": self.tokens,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "operations": self.operations,
            "model_operations": self.model_operations,
            "mfu": self.mfu,
            "efficiency": self.efficiency,
            "compile_seconds": self.compile_seconds,
            "alternatives": [
                {
                    "stage": one.stage,
                    "mesh": list(one.mesh),
                    "given_up": one.given_up,
                    "peak": None if one.plan is None else one.plan.memory.peak,
                    "seconds": None if one.plan is None else one.plan.time.seconds,
                    "verdict": one.verdict,
                }
                for one in self.alternatives
            ],
        }


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        stage: ``"off"``, ``"1"``, ``"2"`` or ``"3"``.
        mesh: shape of the grid of ranks.
        given_up: what it costs time to save memory by: ``"recompute"``, ``"optimizer on the CPU, 4 micro-batches"``, or
            nothing.
        plan: what it takes; None where it was not compiled.
        verdict: why it is chosen, or not.
        options: the configuration that it stands for, as far as it was searched for.
    """

    stage: str
    mesh: tuple[int, ...]
    given_up: str
    plan: PlanData | None = field(repr=False)
    verdict: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
