"""``config.stage = "auto"``: what a running graph's first call chooses, and then runs.

Every rank looks for it by itself, in a forecast that follows from shapes and the configuration alone; a difference is
an error on all of them. A CPU is planned for as the machine ``"cpu"``, a GPU by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zerograph.base.sizes import show_bytes
from zerograph.compiler.members import Members
from zerograph.errors import ConfigError, MemoryBudgetError
from zerograph.planner.machine import Machine, default_headroom, machine
from zerograph.planner.plan import Call
from zerograph.planner.plan_data import Candidate
from zerograph.planner.preparable import Preparable
from zerograph.planner.search import Search, search
from zerograph.runtime.job.process_group import Job, agree, digest

_log = logging.getLogger("zerograph")


def choose(
    graph: Preparable,
    job: Job,
    members: Callable[[], Members],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    doing: str,
) -> None:
    """Set the graph's options to the fastest way to train that fits ``config.memory_budget``, on the job's own mesh.

    Args:
        members: finds those of the graph.
        args, kwargs: this rank's part of the batch.
        doing: names the step in messages.

    Raises:
        MemoryBudgetError: nothing fits; the message has what was tried.
        ConfigError: a device that no machine is known for, or a CPU's graph without a budget.
    """
    problem: BaseException | None = None
    chosen: dict[str, Any] = {}
    try:
        with job.liveness.busy(f"choosing a stage for {doing}"):
            found = _found(graph, job, members(), Call(tuple(args), dict(kwargs)))
        assert found.best is not None
        chosen = _chosen(found.best)
    except BaseException as error:
        problem = error
    shown = {name: str(value) for name, value in chosen.items()}
    agree(job, f"running {doing}", digest(shown), lambda: shown, problem)
    for name, value in chosen.items():
        setattr(graph.config, name, value)
    _log.info("stage 'auto' chose %s", ", ".join(f"{name}={value}" for name, value in shown.items()))


def _found(graph: Preparable, job: Job, members: Members, call: Call) -> Search:
    if graph.config.mode == "non_distributed":
        raise ConfigError(
            "config.stage = 'auto' looks among shards that cut through parameters, which 'non_distributed' does not\n"
            "Choose config.enable_zero(True, stage='auto'), or a stage of your own."
        )
    device = next((one.device for one in members.parameters.values()), torch.device("cpu"))
    described, limit = _machine(device), graph.config.memory_bytes
    if limit is None and device.type == "cpu":
        raise ConfigError(
            "config.stage = 'auto' on the CPU needs config.memory_budget: how much of it this rank may have, '4GiB'"
        )
    if limit is None:
        limit = int(torch.cuda.get_device_properties(device).total_memory)
        limit -= default_headroom(limit, accelerator=True)
    described = replace(described, device=replace(described.device, memory=limit, headroom=0))
    found = search(graph, call, [job.mesh.shape], described)
    if found.best is None:
        raise MemoryBudgetError(
            f"nothing that config.stage = 'auto' tried fits into {show_bytes(limit)} on this rank:\n"
            + "\n".join(_line(one) for one in found.candidates)
        )
    return found


def _machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return machine("cpu")
    name = torch.cuda.get_device_name(device)
    known = next((one for one in ("h200", "h100", "a100") if one.upper() in name.upper()), None)
    if known is None:
        raise ConfigError(
            f"config.stage = 'auto' knows no times of {name!r}\n"
            "Measure them by `zerograph calibrate mine.yaml`, and set what zg.plan(..., stage='auto', "
            "device='mine.yaml') chooses."
        )
    return machine(known)


def _chosen(best: Candidate) -> dict[str, Any]:
    """What to set. A budget stays where it is not what was searched for: it holds for later batches too."""
    chosen = {"stage": 1, **best.options}
    return {name: value for name, value in chosen.items() if name != "memory_budget" or value is not None}


def _line(one: Candidate) -> str:
    stage = "off" if one.stage == "off" else f"stage {one.stage}"
    return f"  {stage}{', ' if one.given_up else ''}{one.given_up}: {one.verdict}"
