"""Steps that the planner predicts for its H100, without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import zerograph as zg
from benchmarks.contenders.zerograph import TrainStep
from benchmarks.simulated.contenders import CONTENDERS
from benchmarks.simulated.sizes import SIZES

Key = tuple[str, int, int]


def key_of(row: Mapping[str, Any]) -> Key:
    """Return what a prediction depends on: size, stage, ranks. The planner knows no backends."""
    return row["size"], CONTENDERS[row["contender"]].stage, row["ranks"]


def predicted(rows: Iterable[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    return {(row["size"], row["stage"], row["ranks"]): row for row in rows if row["kind"] == "planned"}


def missing(rows: list[dict[str, Any]]) -> list[Key]:
    """Return what was measured of zerograph and has no prediction in the rows."""
    measured = [row for row in rows if row["kind"] == "step" and "ms" in row and CONTENDERS[row["contender"]].planned]
    return sorted({key_of(row) for row in measured} - set(predicted(rows)))


def predict(key: Key) -> dict[str, Any]:
    """Plan a step. ``ms`` is the time in which the device computes: simulated ranks have no wire."""
    size, stage, ranks = key
    task = SIZES[size].task()
    with torch.device("meta"):
        model = task.model()
    batch = tuple(part.to("meta") for part in task.batches(0)[0])
    step = TrainStep(task, model)
    # A plan is of tensors on meta, for which torch.autocast of CUDA does nothing.
    step.config.enable_amp(dtype=torch.bfloat16)
    plan = zg.plan(step, batch, world_size=ranks, stage=stage, device="h100")
    return {"kind": "planned", "size": size, "stage": stage, "ranks": ranks, "ms": plan.time.compute * 1000}
