"""One self-contained HTML file: the packed data, and the code that draws it.

Several steps on one page are several reports in frames, which the page creates from one template. The page and the
frames load nothing: the page's content security policy holds in frames too.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from importlib import resources
from typing import Any

from zerograph.base.palette import style_sheet
from zerograph.inspection.report.data import Report
from zerograph.inspection.report.layout import lay_out

_ASSETS = resources.files("zerograph.inspection.report") / "assets"
_SCRIPTS = ("model.js", "shapes.js", "graph.js", "charts.js", "export.js", "report.js")
_BESIDE_SCRIPTS = ("model.js", "beside.js")


def page(report: Report) -> str:
    """Return the page as text; names from the user's code are packed or escaped."""
    return render(report.title, pack(contents(report)))


def beside(title: str, reports: Sequence[Report]) -> str:
    """Return a page that shows several steps side by side, over the same scales."""
    template = render("", "\0").replace("<html ", "<html data-beside ", 1)
    return _filled(
        "beside.html",
        title=html.escape(title),
        style=style_sheet() + _asset("report.css"),
        script="\n".join(map(_asset, _BESIDE_SCRIPTS)),
        template=pack(template),
        data="\n".join(pack(contents(report)) for report in reports),
    )


def render(title: str, data: str) -> str:
    """Return the page around packed data."""
    return _filled(
        "page.html",
        title=html.escape(title),
        style=style_sheet() + _asset("report.css"),
        library=_asset("cytoscape.min.js"),
        script="\n".join(map(_asset, _SCRIPTS)),
        data=data,
    )


def _filled(name: str, **parts: str) -> str:
    """Return an asset with its ``{{names}}`` replaced."""
    # Split once: inserted text is not expanded again.
    filled = []
    for piece in _asset(name).split("{{"):
        part, closed, rest = piece.partition("}}")
        filled.append(parts[part] + rest if closed and part in parts else piece)
    return "".join(filled)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def pack(data: Mapping[str, Any] | str) -> str:
    """Return data as JSON, gzipped, in base64: no name can break out of the page."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    # Without a timestamp: equal reports are equal files.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def contents(report: Report) -> dict[str, Any]:
    """Return the data of the page: tables, and columns of numbers into them."""
    nodes, layout = report.nodes, lay_out(report.nodes, report.passes)
    records = nodes.records.items
    return {
        "title": report.title,
        "facts": [astuple(fact) for fact in report.facts],
        "names": nodes.names.items,
        "tensors": nodes.tensors.items,
        "kinds": [astuple(kind) for kind in nodes.kinds.items],
        "boxings": nodes.boxings.items,
        "wheres": [
            (row, where.lane, where.phase, where.source)
            for row, where in zip(layout.row_of, nodes.wheres.items, strict=True)
        ],
        "code": nodes.code,
        "records": {
            "name": [record.name for record in records],
            "kind": [record.kind for record in records],
            "where": [record.where for record in records],
            "tensor": [record.tensor for record in records],
            "boxing": [record.boxing for record in records],
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
                "runs": runs(before, each.records),
                "cells": changed(cells_before, cells),
            }
            for each, before, cells, cells_before in zip(
                report.passes,
                ((), *(each.records for each in report.passes)),
                layout.arranged,
                ({}, *layout.arranged),
                strict=False,
            )
        ],
        "buckets": report.buckets,
        "held": [list(column) for column in zip(*map(astuple, report.allocations), strict=True)],
        "peak": report.peak,
        "time": None
        if report.time is None
        else {
            "machine": report.time.machine,
            "seconds": report.time.seconds,
            # In nanoseconds.
            "events": [
                (node, round(start * 1e9), round((end - start) * 1e9), stream, round(waits * 1e9))
                for node, start, end, stream, waits in report.time.events
            ],
        },
        "turns": list(report.repetitions.items()),
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
