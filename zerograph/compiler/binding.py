"""Bind a prepared step to its state, and to the other tensors that it reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zerograph.base.collection import collection_paused
from zerograph.compiler.compiled import CompiledStep, PreparedStep
from zerograph.compiler.members import Members
from zerograph.config import Config
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.metadata import Role, meta
from zerograph.ir.step_graph import output_nodes, placeholders, writes
from zerograph.optim.hyperparameters import place
from zerograph.runtime.backends import backends
from zerograph.runtime.executor import Lookup, bind, with_low_overhead
from zerograph.runtime.heap import keep_freed
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.state import Store


@collection_paused()
def bind_step(
    job: Job,
    members: Members,
    prepared: PreparedStep,
    backend: str,
    function: backends.Compiled,
    stores: Mapping[str, Store],
    config: Config,
) -> CompiledStep:
    """Return the step with its state and its other tensors bound to the compiled function."""
    graph = prepared.graph
    lookups = _lookups(members, prepared)
    written = {meta(target)["role"] for _, target, _ in writes(prepared.captured.graph.graph)}
    executor = bind(job, graph, function, stores, lookups, written=written)
    if backend in backends.BACKENDS:
        executor = with_low_overhead(executor)
    if config.keep_freed_memory and all(
        value.device.type == "cpu"
        for node in placeholders(graph.graph)
        if isinstance(value := node.meta["val"], Tensor)
    ):
        keep_freed()
    numbers = {
        name: place(update.optimizer, update.group, update.program.numbers[short])
        for planned in prepared.layout
        for update in planned.updates
        for short, name in update.numbers().items()
    }
    output = graph.graph.output_node().meta
    returned = zip(output["needs"], output_nodes(graph.graph), output["roles"], strict=True)
    outputs = tuple((sbp, meta(node)["global"]) for sbp, node, role in returned if role.kind == "output")
    return CompiledStep(
        prepared=prepared,
        backend=backend,
        executor=executor,
        stores=stores,
        numbers=numbers,
        outputs=outputs,
        lookups=lookups,
        dims=dict(prepared.captured.sizes.dims) if prepared.captured.sizes else {},
    )


def _lookups(members: Members, prepared: PreparedStep) -> dict[Role, Lookup]:
    """Return functions that return the tensors that are in no store: parameters, buffers, and those of the scaler."""
    lookups = {Role("parameter", name): _attribute(members.root, name) for name in members.parameters}
    lookups |= {Role("buffer", name): _attribute(members.root, name) for name in members.buffers}
    if (scaler := prepared.context.numerics.scaler) is not None:
        for node in placeholders(prepared.graph.graph, "scaler"):
            role, device = meta(node)["role"], node.meta["val"].device
            lookups[role] = functools.partial(_scaler_tensor, scaler, role.name, device)
    return lookups


def _scaler_tensor(scaler: GradScaler, name: str, device: torch.device) -> Tensor:
    return scaler.tensors(device)[name]


def _attribute(root: nn.Module, name: str) -> Lookup:
    """Return a function that reads a tensor of ``root``. The user may replace the tensor between steps."""
    path, _, attribute = name.rpartition(".")
    return functools.partial(getattr, root.get_submodule(path), attribute)
