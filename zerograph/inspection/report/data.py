"""The contents of a report, as the page's scripts read them: nodes after every pass, memory and time."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zerograph.base import source
from zerograph.inspection.report.layout import lay_out
from zerograph.inspection.report.order import Order, allocations
from zerograph.inspection.report.records import Nodes, Reader, Record
from zerograph.inspection.step import Inspection
from zerograph.ir import precision
from zerograph.ir.memory import Profile, profile
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import collective_runs, placeholders
from zerograph.passes.pipeline import stages
from zerograph.planner import speed
from zerograph.planner.machine import Machine
from zerograph.planner.timeline import Timeline, timeline


def collect(step: Inspection, title: str, machine: Machine | None) -> dict[str, Any]:
    """Collect the contents of a report: tables, and columns of numbers into them. This runs every pass again.

    Args:
        machine: predict times for it; None for a report without times.
    """
    context, last = step.context, step.passes[-1].graph.graph
    nodes = Nodes()
    reader = Reader(nodes, context)
    # The last graph is the one that runs: memory and times are predicted for its nodes.
    earlier = zip(step.passes[:-1], stages(step.captured.graph, context), strict=False)
    orders = [reader.read(Order(module.graph)) for _, (_, module) in earlier]
    order = Order(last)
    orders.append(reader.read(order))
    memory = profile(last)
    time = None if machine is None else timeline(last, machine, context.mesh)
    layout, records = lay_out(nodes, orders), nodes.records.items
    return {
        "title": title,
        "facts": facts(step, memory, machine, time),
        "names": nodes.names.items,
        "tensors": nodes.tensors.items,
        "kinds": nodes.kinds.items,
        "boxings": nodes.boxings.items,
        "wheres": [
            (row, where.lane, where.phase, where.source)
            for row, where in zip(layout.row_of, nodes.wheres.items, strict=True)
        ],
        "code": nodes.code,
        "records": {
            **{name: [getattr(each, name) for each in records] for name in Record._fields if name != "inputs"},
            "reads": [len(record.inputs) for record in records],
            "inputs": [name for record in records for name in record.inputs],
        },
        "rows": [astuple(row) for row in layout.rows],
        "cells": [[number for position in cell for number in position] for cell in layout.cells],
        "passes": [
            {
                "name": each.name,
                "summary": each.summary,
                "seconds": round(each.seconds, 3),
                "runs": runs(*numbers),
                "cells": changed(*cells),
            }
            for each, numbers, cells in zip(
                step.passes, pairwise([(), *orders]), pairwise([{}, *layout.arranged]), strict=True
            )
        ],
        "buckets": {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in context.buckets},
        "held": [list(column) for column in zip(*allocations(memory, last, order), strict=True)],
        "peak": memory.peak,
        "time": None if machine is None or time is None else _time(machine, time, order),
        # Runs per step of the nodes that run more than once.
        "turns": [(index, each.row.times) for index, each in enumerate(order.nodes) if each.row.times > 1],
    }


def _time(machine: Machine, time: Timeline, order: Order) -> dict[str, Any]:
    """Return (node, start, duration, stream, waiting) of each event in nanoseconds; of a loop the first micro-batch."""
    indices = {each.node: index for index, each in enumerate(order.nodes)}
    return {
        "machine": machine.name,
        "seconds": time.seconds,
        "events": [
            (
                indices[event.node],
                round(event.start * 1e9),
                round(event.seconds * 1e9),
                event.stream,
                round(event.waits * 1e9),
            )
            for event in time.events
        ],
    }


def runs(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Encode a list relative to the list before it, as runs: pairs of a start and a length.

    A start >= 0 is an index in the list before, and the run copies from there. A start < 0 is the number
    ``-1 - start``, and the run counts up from it.
    """
    indices = {number: index for index, number in enumerate(before)}
    encoded: list[int] = []
    following: int | None = None
    for number in after:
        index = indices.get(number)
        start = -1 - number if index is None else index
        if start != following:
            encoded += [start, 0]
        encoded[-1] += 1
        following = start - 1 if index is None else start + 1
    return encoded


def changed(before: Mapping[tuple[int, int], int], after: Mapping[tuple[int, int], int]) -> list[int]:
    """Return row, lane and arrangement of each changed cell, flattened; arrangement -1 for a removed cell."""
    new = [number for place, cell in after.items() if before.get(place) != cell for number in (*place, cell)]
    return new + [number for place in before if place not in after for number in (*place, -1)]


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
