"""``zg.plan``: one rank's step, compiled for any number of ranks on a machine that need not be present."""

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
from zerograph.compiler.input_layout import length_of
from zerograph.inspection.step import Prepared
from zerograph.inspection.summary import at_rest
from zerograph.ir import precision
from zerograph.ir.memory import Profile, Storage, profile
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing, TensorKind, boxing_of, meta
from zerograph.ir.sizes import largest
from zerograph.ir.step_graph import collective_runs, placeholders
from zerograph.passes.recompute.cost import flops
from zerograph.planner.closed_form import ModelStates
from zerograph.planner.machine import Machine
from zerograph.planner.plan_data import Plan, Wire
from zerograph.planner.preparable import Preparable, configured
from zerograph.planner.speed import model_flops, operations, peak_rate, tokens
from zerograph.planner.stored import StoredBytes, stored_bytes
from zerograph.planner.timeline import timeline
from zerograph.runtime.wire.selection import Transport


@dataclass(frozen=True)
class Call:
    """A batch of positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def planned(
    graph: Preparable,
    batch: Any,
    mesh: Sequence[int],
    machine: Machine,
    transport: str | Transport = "torch",
    **options: Any,
) -> Plan:
    """Plan a graph on a mesh of that shape, with these options instead of its own.

    Args:
        batch: one rank's part of the batch: a tensor, a tuple of arguments, or a dict of them by name.
        transport: how ranks exchange tensors; see :meth:`zerograph.ZeroGraph.prepare`.

    Raises:
        ZeroGraphError: as compiling the step does.
    """
    began = time.perf_counter()
    args, kwargs = arguments(batch)
    grid = grid_of(mesh)
    with configured(graph, **options_for(machine, graph, options)) as config:
        prepared = graph.prepare(grid, *args, device=device_of(machine), transport=transport, **kwargs)
        shown = config.shown(changed=True)
        low, splitting = config.precision.amp_dtype, config.mesh.context_parallel
    compile_seconds = time.perf_counter() - began
    emitted = prepared.graph.graph
    memory = profile(emitted)
    peak = memory.memory()
    # A step with dynamic dimensions is predicted for the largest sizes, which need not be those of the batch.
    inputs = [node.meta["val"] for node in placeholders(emitted, "input")] if peak.sizes else tensors(batch)
    return Plan(
        mesh=tuple(mesh),
        options=shown,
        precision=precision.precision_text(low, (bucket.dtype for bucket in prepared.context.buckets)),
        machine=machine.name,
        capacity=machine.device.memory,
        headroom=machine.device.headroom,
        parameters=sum(math.prod(slot.shape) for bucket in prepared.context.buckets for slot in bucket.slots),
        at_rest=at_rest(memory),
        most=_most(memory.storages, memory),
        model_states=_model_states(prepared, memory),
        memory=peak,
        host=profile(emitted, host=True).memory() if machine.device.accelerator else None,
        cpu_capacity=machine.device.cpu_memory,
        in_files=stored_bytes(prepared.layout, grid).files,
        profile=memory,
        wire=_wire(prepared),
        time=timeline(emitted, machine, grid),
        samples=_samples(inputs),
        tokens=tokens(inputs),
        operations=operations(emitted, flops),
        model_operations=operations(emitted, model_flops),
        peak_rate=peak_rate(machine, prepared.context.buckets, low),
        prepared=prepared,
        compile_seconds=compile_seconds,
        length=length_of(("", tensor) for tensor in tensors(batch))[1],
        context_parallel=splitting,
    )


def laid_out(graph: Preparable, batch: Any, mesh: Sequence[int], machine: Machine, **options: Any) -> StoredBytes:
    """Return the bytes that a graph's layout stores, and a lower bound of its step's memory; no pass runs.

    Raises:
        ZeroGraphError: as compiling the step does.
    """
    args, kwargs = arguments(batch)
    grid = grid_of(mesh)
    with configured(graph, **options_for(machine, graph, options)) as config:
        layout = graph.lay_out(grid, *args, device=device_of(machine), **kwargs)
        early = not config.policy.split or config.policy.reduce_early
        return stored_bytes(layout, grid, early=early, reduce_dtype=config.precision.reduce_dtype)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keyword arguments of ``build()`` for a batch."""
    if isinstance(batch, Call):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def grid_of(mesh: Sequence[int]) -> Mesh:
    """Return a mesh of that shape, seen by its first rank."""
    return Mesh(tuple(mesh), (0,) * len(mesh), tuple(f"dimension {dim}" for dim in range(len(mesh))))


def device_of(machine: Machine) -> str:
    """Return the device type whose tensors represent the machine's, for :meth:`zerograph.ZeroGraph.prepare`."""
    return "meta" if machine.device.accelerator else "cpu"


def options_for(machine: Machine, graph: Preparable, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with the backend that "auto" resolves to on that machine."""
    backend = options.get("backend", graph.config.backend)
    return {**options, "backend": ("inductor" if machine.device.fuses else "eager") if backend == "auto" else backend}


def _most(storages: Sequence[Storage], memory: Profile) -> dict[str, int]:
    """Return the maximum bytes of these storages at any node, by kind; storages of a loop's body are added."""
    changes: dict[str, Counter[int]] = {}
    for storage in storages:
        of_kind = changes.setdefault(storage.kind, Counter())
        of_kind[storage.born] += storage.bytes
        of_kind[storage.dies + 1] -= storage.bytes
    inside = {
        position: _most([storage for storage in body.storages if not storage.is_input], body)
        for position, body in memory.bodies.items()
    }
    most: dict[str, int] = {}
    for kind in dict.fromkeys([*changes, *(kind for kinds in inside.values() for kind in kinds)]):
        moments = itertools.accumulate(changes.get(kind, Counter())[position] for position in range(len(memory.nodes)))
        most[kind] = max(count + inside.get(position, {}).get(kind, 0) for position, count in enumerate(moments))
    return {kind: count for kind, count in most.items() if count}


def _model_states(prepared: Prepared, memory: Profile) -> ModelStates:
    """Count model states without values in flight: buckets that stage 3 gathers per use, gradients not yet reduced."""
    stored = at_rest(memory)
    policy = prepared.context.policy
    low = any(bucket.compute_dtype is not None for bucket in prepared.context.buckets)
    masters = stored.get("parameters", 0)
    if policy.reshard_after_forward:
        gathered = 0
    elif policy.split:
        gathered = _moved(memory, None, "all-gather").get("gathered", 0)
    else:
        gathered = _most(memory.storages, memory).get("gathered", 0)
    early = policy.split and policy.reduce_early
    return ModelStates(
        parameters=gathered if low else masters + gathered,
        gradients=_moved(memory, "gradient", "reduce-scatter" if early else None).get("gradients", 0),
        optimizer_state=stored.get("optimizer state", 0) + (masters if low else 0),
    )


def _moved(memory: Profile, tensor: TensorKind | None, kind: str | None) -> dict[str, int]:
    """Return the maximum bytes of results of collectives, by kind of memory.

    Args:
        tensor: kind of tensor that the collectives move; None for all.
        kind: kind of collective; None to count the inputs of all collectives instead.
    """
    storages: dict[Storage, None] = {}
    for node in memory.nodes:
        boxing = boxing_of(node)
        if boxing is not None and tensor in (None, boxing.tensor.kind) and kind in (None, boxing.kind):
            for value in node.all_input_nodes if kind is None else node.users:
                storages |= dict.fromkeys(storage for storage in memory.of[value] if storage is not None)
    most = Counter(_most(list(storages), replace(memory, bodies={})))
    for body in memory.bodies.values():
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
    return [leaf for leaf in pytree.tree_leaves(arguments(batch)) if isinstance(leaf, Tensor)]


def samples(batch: Any) -> int:
    """Return the size of dimension 0 of a rank's part of the batch."""
    return _samples(tensors(batch))


def _samples(inputs: Sequence[Tensor]) -> int:
    return min((largest(tensor.shape)[0] for tensor in inputs if tensor.dim()), default=1)
