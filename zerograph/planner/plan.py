"""``zg.plan``: one rank's step, compiled for any number of ranks on a machine that need not be there."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerograph import precision
from zerograph._torch import pytree
from zerograph.inspection.step import Prepared
from zerograph.ir.metadata import Boxing, TensorKind, boxing_of, meta
from zerograph.memory import Memory, Profile, Storage, profile
from zerograph.mesh import Mesh
from zerograph.passes.work import flops
from zerograph.planner.closed_form import ModelStates
from zerograph.planner.machine import Machine
from zerograph.planner.preparable import Preparable, configured
from zerograph.planner.resting import Resting, resting
from zerograph.planner.show import text
from zerograph.planner.speed import model_flops, operations, peak_rate, tokens
from zerograph.planner.timeline import Timeline, timeline
from zerograph.step_graph import collective_runs

if TYPE_CHECKING:
    from zerograph.planner.search import Candidate


@dataclass(frozen=True)
class Call:
    """A batch that is several arguments, some of them by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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
class Plan:
    """One rank's step, foretold.

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
        """The share of the step's time in which the device computes."""
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

        The scores of attention that its backward makes again do not count.
        """
        if self.peak_rate is None or not self.time.seconds:
            return None
        return self.model_operations / self.time.seconds / self.peak_rate

    def __str__(self) -> str:
        return text(self)

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


def planned(graph: Preparable, batch: Any, mesh: Sequence[int], machine: Machine, **options: Any) -> Plan:
    """The plan of a graph on a mesh of that shape, with these options instead of its own.

    Args:
        batch: one rank's part: a tensor, a tuple of arguments, or a dict of them by name.

    Raises:
        ZeroGraphError: as compiling the step does.
    """
    began = time.perf_counter()
    args, kwargs = arguments(batch)
    grid = grid_of(mesh)
    with configured(graph, **_for(machine, graph, options)) as config:
        prepared = graph.prepare(grid, *args, device=stood_for(machine), **kwargs)
        shown = config.shown(changed=True)
        low = config.amp_dtype
    took = time.perf_counter() - began
    emitted = prepared.graph.graph
    held = profile(emitted)
    memory = held.memory()
    return Plan(
        mesh=tuple(mesh),
        options=shown,
        precision=precision.shown(low, (bucket.dtype for bucket in prepared.context.buckets)),
        machine=machine.name,
        capacity=machine.device.memory,
        headroom=machine.device.headroom,
        parameters=sum(math.prod(slot.shape) for bucket in prepared.context.buckets for slot in bucket.slots),
        at_rest=_at_rest(held),
        most=_most(held.storages, held),
        model_states=_model_states(prepared, held),
        memory=memory,
        host=profile(emitted, host=True).memory() if machine.device.accelerator else None,
        cpu_capacity=machine.device.cpu_memory,
        in_files=resting(prepared.layout, grid).files,
        profile=held,
        wire=_wire(prepared),
        time=timeline(emitted, machine, grid),
        samples=samples(batch),
        tokens=tokens(tensors(batch)),
        operations=operations(emitted, flops),
        model_operations=operations(emitted, model_flops),
        peak_rate=peak_rate(machine, prepared.context.buckets, low),
        prepared=prepared,
        compile_seconds=took,
    )


def laid_out(graph: Preparable, batch: Any, mesh: Sequence[int], machine: Machine, **options: Any) -> Resting:
    """What rests where, and what a step holds beside that whatever it does: of a layout alone, without a pass run.

    Raises:
        ZeroGraphError: as compiling the step does.
    """
    args, kwargs = arguments(batch)
    grid = grid_of(mesh)
    with configured(graph, **_for(machine, graph, options)) as config:
        layout = graph.lay_out(grid, *args, device=stood_for(machine), **kwargs)
        early = not config.policy.split or config.policy.reduce_early
        return resting(layout, grid, early=early, reduce_dtype=config.reduce_dtype)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``build()`` is called with a batch."""
    if isinstance(batch, Call):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def grid_of(mesh: Sequence[int]) -> Mesh:
    """The first rank's place on a mesh of that shape."""
    return Mesh(tuple(mesh), (0,) * len(mesh), tuple(f"dimension {dim}" for dim in range(len(mesh))))


def stood_for(machine: Machine) -> str:
    """What tensors stand for those of the machine, as :meth:`zerograph.ZeroGraph.prepare` takes it."""
    return "meta" if machine.device.accelerator else "cpu"


def _for(machine: Machine, graph: Preparable, options: dict[str, Any]) -> dict[str, Any]:
    """The options, and the backend that "auto" would be on that machine."""
    backend = options.get("backend", graph.config.backend)
    return {**options, "backend": ("inductor" if machine.device.fuses else "eager") if backend == "auto" else backend}


def _at_rest(held: Profile) -> dict[str, int]:
    found: Counter[str] = Counter()
    for node in held.nodes:
        if node.op in ("placeholder", "get_attr"):
            for one in held.of[node]:
                if one is not None and one.kind != "inputs":
                    found[one.kind] += one.bytes
    return dict(found)


def _most(storages: Sequence[Storage], held: Profile) -> dict[str, int]:
    """By kind, the most bytes that any node finds of these, and of what a loop's body makes meanwhile."""
    changes: dict[str, Counter[int]] = {}
    for one in storages:
        of_kind = changes.setdefault(one.kind, Counter())
        of_kind[one.born] += one.bytes
        of_kind[one.dies + 1] -= one.bytes
    inside = {
        position: _most([one for one in body.storages if not one.given], body) for position, body in held.bodies.items()
    }
    most: dict[str, int] = {}
    for kind in dict.fromkeys([*changes, *(kind for kinds in inside.values() for kind in kinds)]):
        moments = itertools.accumulate(changes.get(kind, Counter())[position] for position in range(len(held.nodes)))
        most[kind] = max(count + inside.get(position, {}).get(kind, 0) for position, count in enumerate(moments))
    return {kind: count for kind, count in most.items() if count}


def _model_states(prepared: Prepared, held: Profile) -> ModelStates:
    """Without what is only on its way: buckets that stage 3 gathers around each use, gradients not yet reduced."""
    rests = _at_rest(held)
    policy = prepared.context.policy
    low = any(bucket.compute_dtype is not None for bucket in prepared.context.buckets)
    masters = rests.get("parameters", 0)
    if policy.regather:
        gathered = 0
    elif policy.split:
        gathered = _moved(held, None, "all-gather").get("gathered", 0)
    else:
        gathered = _most(held.storages, held).get("gathered", 0)
    early = policy.split and policy.reduce_early
    return ModelStates(
        parameters=gathered if low else masters + gathered,
        gradients=_moved(held, "gradient", "reduce-scatter" if early else None).get("gradients", 0),
        optimizer_state=rests.get("optimizer state", 0) + (masters if low else 0),
    )


def _moved(held: Profile, tensor: TensorKind | None, kind: str | None) -> dict[str, int]:
    """By kind, the most of what collectives of such tensors yield, of that ``kind``; None: of what any is given."""
    found: dict[Storage, None] = {}
    for node in held.nodes:
        boxing = boxing_of(node)
        if boxing is not None and tensor in (None, boxing.tensor.kind) and kind in (None, boxing.kind):
            for one in node.all_input_nodes if kind is None else node.users:
                found |= dict.fromkeys(storage for storage in held.of[one] if storage is not None)
    most = Counter(_most(list(found), replace(held, bodies={})))
    for body in held.bodies.values():
        most |= Counter(_moved(body, tensor, kind))
    return dict(most)


def _wire(prepared: Prepared) -> list[Wire]:
    times: Counter[tuple[str, str, int]] = Counter()
    sent: Counter[tuple[str, str, int]] = Counter()
    for node, count in collective_runs(prepared.graph.graph):
        boxing: Boxing = meta(node)["boxing"]
        key = boxing.kind, boxing.phase, boxing.dim
        times[key] += count
        sent[key] += round(boxing.sent) * count
    return [Wire(kind, phase, dim, times[kind, phase, dim], sent[kind, phase, dim]) for kind, phase, dim in times]


def tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order."""
    return [one for one in pytree.tree_leaves(arguments(batch)) if isinstance(one, Tensor)]


def samples(batch: Any) -> int:
    """Return the size of dimension 0 of a rank's part of the batch."""
    return min((one.shape[0] for one in tensors(batch) if one.dim()), default=1)
