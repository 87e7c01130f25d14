"""``config.zero.stage = "auto"``: the choice of a graph's first call.

Every rank searches by itself, with a prediction that depends on shapes and the configuration alone; a difference
between ranks is an error on all of them. A CPU is planned for as the machine ``"cpu"``, a GPU by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zerograph.base.sizes import show_bytes
from zerograph.compiler.members import Members
from zerograph.compiler.virtual_ranks import slices_per_rank
from zerograph.errors import ConfigError, MemoryBudgetError
from zerograph.planner.machine import Machine, default_headroom, machine
from zerograph.planner.plan import Call
from zerograph.planner.plan_data import Candidate
from zerograph.planner.preparable import Preparable
from zerograph.planner.search import Search, search
from zerograph.runtime.job.process_group import Job, agreeing
from zerograph.runtime.wire.selection import Transport, transport_of

_log = logging.getLogger("zerograph")


def choose(
    graph: Preparable,
    job: Job,
    members: Callable[[], Members],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    doing: str,
) -> None:
    """Set the graph's options to the fastest way to train that fits the memory budget, on the job's own mesh.

    Args:
        members: returns the members of the graph.
        args, kwargs: this rank's part of the batch.
        doing: name of the step in messages.

    Raises:
        MemoryBudgetError: nothing fits; the message lists what was tried.
        ConfigError: no machine describes the device, or the graph is on the CPU without a budget.
    """
    # Collectives and the job's own exchanges differ in the memory that they take.
    transport = transport_of(job)
    with agreeing(job, f"running {doing}") as shown:
        with job.liveness.busy(f"choosing a stage for {doing}"):
            result = _search(graph, job, members(), Call(tuple(args), dict(kwargs)), transport)
        assert result.best is not None
        chosen = _chosen(result.best)
        shown |= {name: str(value) for name, value in chosen.items()}
    graph.config.set(**chosen)
    _log.info("stage 'auto' chose %s", ", ".join(f"{name}={value}" for name, value in shown.items()))


def _search(graph: Preparable, job: Job, members: Members, call: Call, transport: Transport) -> Search:
    if graph.config.virtual_ranks is not None:
        slices_per_rank(graph.config, job.mesh)
    device = next((parameter.device for parameter in members.parameters.values()), torch.device("cpu"))
    described, limit = _machine(device), graph.config.memory_bytes
    if limit is None and device.type == "cpu":
        raise ConfigError(
            "config.zero.stage = 'auto' on the CPU needs config.memory.memory_budget: the memory of this rank, such as "
            "'4GiB'"
        )
    if limit is None:
        limit = int(torch.cuda.get_device_properties(device).total_memory)
        limit -= default_headroom(limit, accelerator=True)
    order = tuple(torch.tensor(job.grid, device="cpu").flatten().tolist())
    in_order = order == tuple(range(len(order)))
    device_of_rank = replace(described.device, memory=limit, headroom=0)
    described = replace(described, device=device_of_rank, order=None if in_order else order)
    result = search(graph, call, [job.mesh.shape], described, transport=transport)
    if result.best is None:
        raise MemoryBudgetError(
            f"nothing that config.zero.stage = 'auto' tried fits into {show_bytes(limit)} on this rank:\n"
            + "\n".join(_line(candidate) for candidate in result.candidates)
        )
    return result


def _machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return machine("cpu")
    name = torch.cuda.get_device_name(device)
    builtin = next((key for key in ("h200", "h100", "a100") if key.upper() in name.upper()), None)
    if builtin is None:
        raise ConfigError(
            f"config.zero.stage = 'auto' has no machine for {name!r}\n"
            "Measure one with `zerograph calibrate mine.yaml`, and set the options that zg.plan(..., stage='auto', "
            "device='mine.yaml') chooses."
        )
    return machine(builtin)


def _chosen(best: Candidate) -> dict[str, Any]:
    """Return the options to set. The user's budget stays unless the search set one: it holds for later batches too."""
    return {name: value for name, value in best.options.items() if name != "memory_budget" or value is not None}


def _line(candidate: Candidate) -> str:
    stage = "off" if candidate.stage == "off" else f"stage {candidate.stage}"
    return f"  {', '.join(filter(None, (stage, candidate.trade_offs)))}: {candidate.verdict}"
