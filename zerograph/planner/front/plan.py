"""``zg.plan``: what users call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zerograph.base.sizes import in_bytes
from zerograph.errors import ConfigError
from zerograph.planner.front.subject import Loss, Optimizer, graph_of
from zerograph.planner.machine import Machine, default_headroom, machine
from zerograph.planner.plan import Plan, planned
from zerograph.planner.plan_data import Candidate
from zerograph.planner.search import STAGES, search


def plan(
    model: Any,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    world_size: int | None = None,
    mesh: Sequence[int] | None = None,
    stage: int | str | None = None,
    device: str | os.PathLike[str] | Machine = "h100",
    loss: Loss | None = None,
    fit: int | str | None = None,
    headroom: int | str | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Plan:
    """What a training step takes on each of any number of ranks, without running it: memory, wire, time.

    The step is compiled as it would be there: the same passes, the same emitted graph. No accelerator is needed, no
    process group, and no memory for weights that are on the meta device.

    Args:
        model: a module, a ``ZeroGraph``, or a function without arguments that makes one, which is called with the meta
            device as default.
        batch: one rank's part of the batch: a tensor, a tuple of arguments, or a dict of them; may be on the meta
            device.
        optimizer: of a module: a function of its parameters, ``functools.partial(torch.optim.AdamW, lr=1e-4)``. None:
            a forward pass.
        world_size: the number of ranks, in a line. ``mesh`` instead gives the shape of a grid, the last dimension of
            which is closest in the network: ZeRO splits along it.
        stage: 1, 2 or 3; 0 or ``"off"`` for data parallel; ``"auto"`` for the fastest that fits, with as few
            trade-offs for memory as it needs (see :mod:`zerograph.planner.search`); None: that of the configuration.
        device: a machine that is built in, a YAML file, or a :class:`Machine`.
        loss: makes a loss of what the module returns. None: that is one, or has one as ``loss``.
        fit: the size of a rank's device, in bytes or as ``"80GB"``, instead of the memory that ``device`` has.
        headroom: what of that a plan leaves free for the device's context, NCCL's buffers and fragmentation, in bytes
            or as ``"4GiB"``. None: 8 %, and at least 2 GiB, of an accelerator; nothing of a CPU.
        nvme_path: with ``stage="auto"``, a directory: then the optimizer's state and parameters may rest in files
            there, too, as ``config.offload_optimizer`` and ``offload_parameters`` have it. It need not exist.
        options: further options of :class:`zerograph.config.Config`.

    Returns:
        The plan. With ``stage="auto"`` that of the fastest that fits, or if none does of the one with the lowest peak,
        and all that were tried as its ``alternatives``.

    Raises:
        ConfigError: an argument that is none of these, or an option that does not exist.
        ZeroGraphError: as compiling the step does.
    """
    described = machine(device)
    memory = described.device.memory if fit is None else _size("fit", fit)
    free = default_headroom(memory, accelerator=described.device.accelerator)
    if headroom is not None:
        free = 0 if headroom in (0, "0") else _size("headroom", headroom)
    described = replace(described, device=replace(described.device, memory=memory, headroom=free))
    shape = _shape(world_size, mesh)
    graph = graph_of(model, optimizer, loss)
    if stage == "auto":
        folder = None if nvme_path is None else os.fspath(nvme_path)
        return _fastest(graph, batch, shape, described, mesh is None, {**options, "nvme_path": folder})
    if nvme_path is not None:
        raise ConfigError("plan(nvme_path=) is for stage='auto': else give optimizer_offload= and parameter_offload=")
    chosen = {} if stage is None else STAGES.get({"0": "off"}.get(str(stage), str(stage)))
    if chosen is None:
        raise ConfigError(f"stage = {stage!r}: choose 1, 2 or 3, 0 for data parallel, or 'auto'")
    return planned(graph, batch, shape, described, **{**options, **chosen})


def _fastest(
    graph: Any,
    batch: Any,
    shape: Sequence[int],
    described: Machine,
    free: bool,
    options: dict[str, Any],
) -> Plan:
    """``free``: a line of ranks may be made a grid of the machine's nodes."""
    meshes = [tuple(shape)]
    inner = described.links[0].ranks
    if free and inner is not None and inner < shape[0] and shape[0] % inner == 0:
        meshes.append((shape[0] // inner, inner))
    found = search(graph, batch, meshes, described, **options)
    best = found.best or min((one for one in found.candidates if one.plan is not None), key=_peak, default=None)
    if best is None or best.plan is None:
        raise ConfigError(f"nothing of this can be compiled: {found.candidates[0].verdict}")
    assert isinstance(best.plan, Plan)
    return replace(best.plan, alternatives=found.candidates)


def _size(name: str, value: int | str) -> int:
    size = in_bytes(value)
    if size is None:
        raise ConfigError(f"plan({name}={value!r}): give bytes, more than 0, or a size like '80GB' or '40GiB'")
    return size


def _peak(one: Candidate) -> int:
    assert one.plan is not None
    return one.plan.memory.peak


def _shape(world_size: int | None, mesh: Sequence[int] | None) -> tuple[int, ...]:
    if (world_size is None) == (mesh is None):
        raise ConfigError("give world_size=, the number of ranks, or mesh=, the shape of their grid")
    shape = (world_size,) if mesh is None else tuple(mesh)
    if not shape or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ConfigError(f"world_size={world_size!r}, mesh={mesh!r}: numbers of ranks are whole numbers from 1 up")
    return shape  # type: ignore[return-value]
