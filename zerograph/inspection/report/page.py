"""One self-contained HTML file: the packed data, and the code that draws it.

Several steps on one page are several reports in frames, which the page creates from one template. The page and the
frames load nothing: the page's content security policy holds in frames too.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from zerograph.base.palette import style_sheet

_ASSETS = resources.files("zerograph.inspection.report") / "assets"
_SCRIPTS = ("model.js", "shapes.js", "graph.js", "charts.js", "export.js", "report.js")
_BESIDE_SCRIPTS = ("model.js", "beside.js")


def page(report: Mapping[str, Any]) -> str:
    """Return the page as text; names from the user's code are packed or escaped."""
    return render(report["title"], pack(report))


def beside(title: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a page that shows several steps side by side, over the same scales."""
    template = render("", "\0").replace("<html ", "<html data-beside ", 1)
    return _filled(
        "beside.html",
        title=html.escape(title),
        style=style_sheet() + _asset("report.css"),
        script="\n".join(map(_asset, _BESIDE_SCRIPTS)),
        template=pack(template),
        data="\n".join(pack(report) for report in reports),
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


def _filled(asset: str, **parts: str) -> str:
    """Return an asset with its ``{{names}}`` replaced."""
    # In one pass: inserted text is not expanded again.
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts.get(name[1], name[0]), _asset(asset))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def pack(data: Mapping[str, Any] | str) -> str:
    """Return data as JSON, gzipped, in base64: no name can break out of the page."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    # Without a timestamp: equal reports are equal files.
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
