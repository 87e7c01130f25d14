"""One HTML file that needs nothing else: the data, packed, and the code that draws it.

Several steps on one page are several reports in frames, made by the page from one template. The page and the frames
load nothing: frames have the page's policy too.
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

from zerograph.inspection.report.data import Report
from zerograph.inspection.report.layout import lay_out

_ASSETS = resources.files("zerograph.inspection.report") / "assets"
_SCRIPTS = ("model.js", "shapes.js", "graph.js", "charts.js", "export.js", "report.js")
_BESIDE_SCRIPTS = ("model.js", "beside.js")


def page(report: Report) -> str:
    """Return the page as text. Names from the user's code are in it only packed, or escaped."""
    return render(report.title, pack(contents(report)))


def beside(title: str, reports: Sequence[Report]) -> str:
    """Return a page that shows several steps side by side, over the same scales."""
    template = render("", "\0").replace("<html ", "<html data-beside ", 1)
    return _filled(
        "beside.html",
        title=html.escape(title),
        style=_asset("report.css"),
        script="\n".join(map(_asset, _BESIDE_SCRIPTS)),
        template=pack(template),
        data="\n".join(pack(contents(report)) for report in reports),
    )


def render(title: str, data: str) -> str:
    """Return the page around packed data."""
    return _filled(
        "page.html",
        title=html.escape(title),
        style=_asset("report.css"),
        library=_asset("cytoscape.min.js"),
        script="\n".join(map(_asset, _SCRIPTS)),
        data=data,
    )


def _filled(name: str, **parts: str) -> str:
    """Return an asset with its ``{{names}}`` replaced."""
    # Cut once: what is put in is not looked at again.
    filled = []
    for piece in _asset(name).split("{{"):
        part, closed, rest = piece.partition("}}")
        filled.append(parts[part] + rest if closed and part in parts else piece)
    return "".join(filled)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def pack(data: Mapping[str, Any] | str) -> str:
    """Return data as JSON, gzipped, in base64: no name in it can break out of the page."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    # No time of packing in it: equal reports are equal files.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def contents(report: Report) -> dict[str, Any]:
    """What the page reads: tables, and columns of numbers into them."""
    nodes, layout = report.nodes, lay_out(report.nodes, report.passes)
    records = nodes.records.items
    return {
        "title": report.title,
        "facts": [astuple(one) for one in report.facts],
        "names": nodes.names.items,
        "tensors": nodes.tensors.items,
        "kinds": [astuple(one) for one in nodes.kinds.items],
        "boxings": nodes.boxings.items,
        "wheres": [
            (row, one.lane, one.phase, one.source) for row, one in zip(layout.row_of, nodes.wheres.items, strict=True)
        ],
        "code": nodes.code,
        "records": {
            "name": [one.name for one in records],
            "kind": [one.kind for one in records],
            "where": [one.where for one in records],
            "tensor": [one.tensor for one in records],
            "boxing": [one.boxing for one in records],
            "reads": [len(one.inputs) for one in records],
            "inputs": [name for one in records for name in one.inputs],
        },
        "rows": [astuple(one) for one in layout.rows],
        "cells": [[number for place in cell for number in place] for cell in layout.cells],
        "passes": [
            {
                "name": one.name,
                "summary": one.summary,
                "seconds": round(one.seconds, 3),
                "runs": runs(before, one.records),
                "cells": changed(cells_before, cells),
            }
            for one, before, cells, cells_before in zip(
                report.passes,
                ((), *(one.records for one in report.passes)),
                layout.arranged,
                ({}, *layout.arranged),
                strict=False,
            )
        ],
        "buckets": report.buckets,
        "held": [list(column) for column in zip(*map(astuple, report.held), strict=True)],
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
        "turns": list(report.turns.items()),
    }


def runs(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """A list told by the one before it: pairs of a start and a length.

    A start from 0 up is a place in the list before, and the run is what stands there; one below 0 is the number
    ``-1 - start``, and the run counts up from it.
    """
    places = {number: place for place, number in enumerate(before)}
    found: list[int] = []
    following: int | None = None
    for number in after:
        place = places.get(number)
        start = -1 - number if place is None else place
        if start != following:
            found += [start, 0]
        found[-1] += 1
        following = start - 1 if place is None else start + 1
    return found


def changed(before: Mapping[tuple[int, int], int], after: Mapping[tuple[int, int], int]) -> list[int]:
    """Row, lane and arrangement, one behind the other, of each cell that is not as before; -1 for one that is gone."""
    found = [number for place, cell in after.items() if before.get(place) != cell for number in (*place, cell)]
    return found + [number for place in before if place not in after for number in (*place, -1)]
