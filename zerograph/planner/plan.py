"""``zg.plan``: one rank's step, compiled for any number of ranks on a machine that need not be there."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zerograph._torch import pytree
from zerograph.inspection.step import Prepared
from zerograph.ir import precision
from zerograph.ir.memory import Profile, Storage, profile
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing, TensorKind, boxing_of, meta
from zerograph.ir.step_graph import collective_runs
from zerograph.passes.recompute.cost import flops
from zerograph.planner.closed_form import ModelStates
from zerograph.planner.machine import Machine
from zerograph.planner.plan_data import PlanData, Wire
from zerograph.planner.preparable import Preparable, configured
from zerograph.planner.resting import Resting, resting
from zerograph.planner.show import text
from zerograph.planner.speed import model_flops, operations, peak_rate, tokens
from zerograph.planner.timeline import timeline


@dataclass(frozen=True)
class Call:
    """A batch that is several arguments, some of them by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Plan(PlanData):
    __doc__ = PlanData.__doc__

    def __str__(self) -> str:
        return text(self)


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
        precision=precision.precision_text(low, (bucket.dtype for bucket in prepared.context.buckets)),
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
        position: _most([one for one in body.storages if not one.is_input], body)
        for position, body in held.bodies.items()
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
    if policy.reshard_after_forward:
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
