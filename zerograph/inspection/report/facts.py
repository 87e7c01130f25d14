"""The facts at the head of a report: placement, memory, traffic, predicted time, commit and date."""

from __future__ import annotations

import datetime
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from zerograph.base import source
from zerograph.inspection.step import Inspection
from zerograph.ir import precision
from zerograph.ir.memory import Profile
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import collective_runs, placeholders
from zerograph.planner import speed
from zerograph.planner.machine import Machine
from zerograph.planner.timeline import Timeline

Unit = Literal["", "count", "bytes", "seconds", "per second", "share"]


class Fact(NamedTuple):
    """One fact: text, or a number in a unit."""

    label: str
    value: str | float
    unit: Unit = ""


def facts(step: Inspection, profile: Profile, machine: Machine | None, time: Timeline | None) -> list[Fact]:
    """Return the facts of a step, in the order in which a page shows them.

    Args:
        profile: memory of the step's last graph.
        machine, time: machine and predicted timeline on it, or None.
    """
    context, graph = step.context, step.passes[-1].graph.graph
    mesh = context.mesh
    policy = "no ZeRO" if context.policy.name == "off" else f"ZeRO {context.policy.name}"
    runs = collective_runs(graph)
    return [
        Fact("placement", policy if context.updates else "no update"),
        Fact("ranks", str(mesh.size) if mesh.dims == 1 else " x ".join(map(str, mesh.shape))),
        Fact("rank", str(mesh.position[0]) if mesh.dims == 1 else str(mesh.position)),
        *([Fact("micro-batches", context.batch.micro_batches, "count")] if context.batch.micro_batches > 1 else []),
        Fact("parameters", _parameters(step), "count"),
        Fact("precision", _precision(step)),
        Fact("collectives", sum(times for _, times in runs), "count"),
        Fact("sent per rank", round(sum(meta(node)["boxing"].sent * times for node, times in runs)), "bytes"),
        Fact("predicted peak", profile.peak, "bytes"),
        *([Fact("bytes are for", validity)] if (validity := profile.memory().validity) else []),
        *([] if machine is None or time is None else _speed(step, machine, time)),
        *_provenance(),
    ]


def _parameters(step: Inspection) -> int:
    """Count the elements of all parameters, in buckets and in none."""
    in_buckets = sum(math.prod(slot.shape) for bucket in step.context.buckets for slot in bucket.slots)
    return in_buckets + sum(value.numel() for value in _plain(step))


def _precision(step: Inspection) -> str:
    """Name the dtypes of compute and, where they differ, of the parameters between steps."""
    stored = [*(bucket.dtype for bucket in step.context.buckets), *(value.dtype for value in _plain(step))]
    return precision.precision_text(_low(step), stored)


def _low(step: Inspection) -> torch.dtype | None:
    """Return the compute dtype of mixed precision; None if it is the dtype of the stored parameters."""
    return next((bucket.compute_dtype for bucket in step.context.buckets if bucket.compute_dtype is not None), None)


def _plain(step: Inspection) -> list[Tensor]:
    """Return the parameters in no bucket."""
    names = {slot.name for bucket in step.context.buckets for slot in bucket.slots}
    nodes = placeholders(step.captured.graph.graph, "parameter")
    return [node.meta["val"] for node in nodes if meta(node)["role"].name not in names]


def _speed(step: Inspection, machine: Machine, time: Timeline) -> list[Fact]:
    """Return the predicted time and the speed of each device, as ``zerograph plan`` shows them."""
    speeds = [Fact(f"predicted step on {machine.name}", time.seconds, "seconds")]
    if not time.seconds:
        return speeds
    graph = step.passes[-1].graph.graph
    count = speed.tokens(meta(node)["val"] for node in placeholders(graph, "input"))
    if count is not None:
        speeds.append(Fact("tokens/s per device", count / time.seconds, "per second"))
    peak = speed.peak_rate(machine, step.context.buckets, _low(step))
    if peak is not None:
        share = speed.operations(graph, speed.model_flops) / time.seconds / peak
        speeds.append(Fact("MFU", share, "share"))
    return speeds


def _provenance() -> list[Fact]:
    """Return the date, and the commit of the working folder if it is in a repository."""
    commit = source.commit()
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return [*([Fact("commit", commit)] if commit else []), Fact("written", day)]
