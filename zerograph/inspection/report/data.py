"""The contents of a report, as the page's scripts read them: nodes after every pass, memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any

from zerograph.inspection.report.facts import facts
from zerograph.inspection.report.layout import lay_out
from zerograph.inspection.report.order import Order, allocations
from zerograph.inspection.report.records import Nodes, Reader, Record
from zerograph.inspection.step import Inspection
from zerograph.ir.memory import profile
from zerograph.passes.pipeline import stages
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
