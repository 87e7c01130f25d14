"""The fastest way to train that fits: stages and meshes, each with as little given up for memory as it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from zerograph.errors import InputError, MemoryBudgetError, ZeroGraphError
from zerograph.graph import ZeroGraph
from zerograph.memory import show_bytes
from zerograph.planner.machine import Machine
from zerograph.planner.plan import Plan, planned
from zerograph.progress import tell

STAGES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    **{str(stage): {"mode": "distributed_split", "stage": stage} for stage in (1, 2, 3)},
}


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        stage: ``"off"``, ``"1"``, ``"2"`` or ``"3"``.
        mesh: shape of the grid of ranks.
        given_up: what it costs time to save memory by: ``"recompute"``, ``"4 micro-batches"``, or nothing.
        plan: what it takes; None where it cannot be compiled.
        verdict: why it is chosen, or not.
    """

    stage: str
    mesh: tuple[int, ...]
    given_up: str
    plan: Plan | None = field(repr=False)
    verdict: str


@dataclass(frozen=True)
class Search:
    """All ways that were tried.

    Attributes:
        best: the fastest that fits; None if none does.
        candidates: in the order in which they were tried.
    """

    best: Candidate | None
    candidates: Sequence[Candidate]


def search(
    graph: ZeroGraph,
    batch: Any,
    meshes: Sequence[Sequence[int]],
    machine: Machine,
    limit: int,
    stages: Sequence[str] = tuple(STAGES),
    **options: Any,
) -> Search:
    """Try every stage on every mesh: as it is, and where that does not fit with less memory for more time.

    First backward makes again what it must (``recompute="auto"`` within ``limit``), then the batch is cut into
    micro-batches as well, twice as many each time. A stage is left at the first that fits.

    Args:
        batch: one rank's part.
        limit: the most bytes on a rank.
    """
    machine = replace(machine, device=replace(machine.device, memory=limit))
    tried: list[Candidate] = []
    combinations = list(itertools.product(meshes, stages))
    for done, (mesh, stage) in enumerate(combinations):
        for given_up, more in _ways(batch, limit, options):
            doing = f"stage {stage} on {_grid(mesh)}{', ' if given_up else ''}{given_up}"
            tell("candidates", done, len(combinations), doing)
            one = _candidate(graph, batch, mesh, machine, stage, given_up, {**options, **STAGES[stage], **more})
            tried.append(one)
            if one.plan is not None and (one.plan.fits or one.plan.memory.at_rest > limit):
                # Or what it keeps between steps is too much: nothing that follows makes that less.
                break
    tell("candidates", len(combinations), len(combinations))
    fitting = [one for one in tried if one.plan is not None and one.plan.fits]
    best = min(fitting, key=_seconds, default=None)
    judged = [replace(one, verdict=_verdict(one, best)) for one in tried]
    return Search(None if best is None else judged[tried.index(best)], judged)


def _ways(batch: Any, limit: int, options: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {}
    saving = {"recompute": "auto", "memory_budget": limit}
    yield "recompute", saving
    samples = _samples(batch)
    steps = int(options.get("gradient_accumulation_steps", 1)) * 2
    while samples % steps == 0:
        yield f"recompute, {steps} micro-batches", {**saving, "gradient_accumulation_steps": steps}
        steps *= 2


def _candidate(
    graph: ZeroGraph,
    batch: Any,
    mesh: Sequence[int],
    machine: Machine,
    stage: str,
    given_up: str,
    options: dict[str, Any],
) -> Candidate:
    plan: Plan | None = None
    verdict = ""
    try:
        plan = planned(graph, batch, mesh, machine, **options)
    except MemoryBudgetError as error:
        verdict = f"does not fit: {show_bytes(error.missing)} too much"
    except InputError:
        raise
    except ZeroGraphError as error:
        verdict = f"cannot be compiled: {str(error).splitlines()[0]}"
    return Candidate(stage, tuple(mesh), given_up, plan, verdict)


def _verdict(one: Candidate, best: Candidate | None) -> str:
    if one.plan is None:
        return one.verdict
    if not one.plan.fits:
        return f"does not fit: {show_bytes(one.plan.memory.peak - one.plan.capacity)} too much"
    assert best is not None
    if one.plan is best.plan:
        return "the fastest that fits"
    return f"fits, {_seconds(one) / _seconds(best) - 1:.1%} slower"


def _seconds(one: Candidate) -> float:
    assert one.plan is not None
    return one.plan.time.seconds


def _samples(batch: Any) -> int:
    """Of a rank's part of the batch: the size of dimension 0."""
    tensors = [one for one in pytree.tree_leaves(batch) if isinstance(one, Tensor) and one.dim()]
    return min((one.shape[0] for one in tensors), default=1)


def _grid(mesh: Sequence[int]) -> str:
    return "x".join(map(str, mesh)) + " ranks"
