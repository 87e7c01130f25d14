"""Pictures that are saved of a page."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from tests.inspection.report_page.browser import By, eventually, opened
from tests.inspection.test_report import HOSTILE, Hostile, Small
from zerograph.inspection import report
from zerograph.ir.mesh import line
from zerograph.passes.pipeline import PIPELINE


def saved(page: Any, button: Any, folder: Path) -> Path:
    """Click a button, and return the file that the browser saved."""
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    button.click()
    eventually(lambda: [one for one in folder.iterdir() if one.suffix in (".svg", ".png")])
    (file,) = folder.iterdir()
    return file


def test_the_graph_is_saved_as_svg_with_all_that_is_open(shared: Any, tmp_path: Path) -> None:
    file = saved(shared, shared.find_element(By.ID, "svg"), tmp_path)
    assert file.name == f"TrainGpt-{PIPELINE[-1].name}.svg"
    drawing = ElementTree.parse(file).getroot()
    texts = [one.text or "" for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == f"TrainGpt: the graph after {PIPELINE[-1].name}"
    assert any("written" in text for text in texts)
    labels = shared.execute_script("return report.graph.visible.map((one) => report.model.rows[one.row].label)")
    # Also of rows below the edge of the screen.
    assert all(any(text.endswith(label[-6:]) for text in texts) for label in labels)
    shapes = [*drawing.iter("{http://www.w3.org/2000/svg}polygon")]
    assert len(shapes) == shared.execute_script("return report.graph.cy.nodes('.boxing').length")


def test_the_graph_is_saved_as_png(shared: Any, tmp_path: Path) -> None:
    content = saved(shared, shared.find_element(By.ID, "png"), tmp_path).read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert min(width, height) > 500


def test_the_chart_is_saved_as_svg_with_its_legend(shared: Any, tmp_path: Path) -> None:
    (button,) = [one for one in shared.find_elements(By.CSS_SELECTOR, "#axis button") if one.text == "SVG"]
    file = saved(shared, button, tmp_path)
    drawing = ElementTree.parse(file).getroot()
    texts = {one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"activations", "forward", "backward", "all-gather", "compute", "collectives"} <= texts
    assert shared.find_element(By.ID, "peak").text in texts
    colors = {one.get("fill") for one in drawing.iter("{http://www.w3.org/2000/svg}rect")}
    assert shared.execute_script("return palette()('--memory-activations')") in colors


def test_a_picture_has_hostile_names_as_text(browser: Any, tmp_path: Path) -> None:
    step = Small(Hostile()).prepare(line(2, 0, "ranks"), torch.ones(2, 8))
    report.write(step, tmp_path / "step.html", title=HOSTILE)
    opened(browser, tmp_path / "step.html")
    for draw in ("graphSvg", "chartSvg"):
        drawing = ElementTree.fromstring(browser.execute_script(f"return {draw}(report)"))
        assert not list(drawing.iter("script"))
        assert any(HOSTILE in (one.text or "") for one in drawing.iter("{http://www.w3.org/2000/svg}text"))
