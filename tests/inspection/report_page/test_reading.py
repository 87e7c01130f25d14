"""The page of a report: open it, open a module, search, switch the pass, hover over the peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.inspection.report_page.browser import ActionChains, By, Keys, drawn, opened, row, rows, tooltip
from tests.inspection.test_report import HOSTILE, Hostile, Small
from zerograph.inspection import report
from zerograph.inspection.step import Prepared
from zerograph.ir.memory import profile
from zerograph.ir.mesh import line


def test_the_page_opens_with_what_the_step_is_and_asks_for_nothing_else(page: Any, path: Path) -> None:
    assert page.find_element(By.TAG_NAME, "h1").text == "TrainGpt"
    assert "ZeRO stage 3" in page.find_element(By.ID, "facts").text
    logged = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in logged if one["method"] == "Network.requestWillBeSent"]
    assert set(asked) <= {path.as_uri(), "about:blank"}


def test_a_module_opens_and_closes(page: Any) -> None:
    page.find_element(By.ID, "collapse").click()
    assert "model.blocks" not in rows(page)
    row(page, "model").click()
    assert "model.blocks" in rows(page)
    row(page, "model").click()
    assert "model.blocks" not in rows(page)


def test_a_module_opens_with_the_keyboard(page: Any) -> None:
    page.find_element(By.ID, "collapse").click()
    row(page, "model").send_keys(Keys.ARROW_RIGHT)
    assert "model.norm" in rows(page)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("title").startswith("model.")
    page.switch_to.active_element.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert "model.norm" not in rows(page)


def test_an_open_leaf_shows_the_nodes_in_it(page: Any, step: Prepared) -> None:
    row(page, "model.head").click()
    nodes = [node for node in step.graph.graph.nodes if node.op == "call_function"]
    inside = {node.name for node in nodes if node.meta["origin"].module == "model.head"}
    assert inside <= drawn(page)


def searching(page: Any) -> Any:
    """Return the field of the search, empty."""
    field = page.find_element(By.ID, "search")
    field.clear()
    return field


def test_searching_for_a_parameter_finds_its_use(shared: Any) -> None:
    search = searching(shared)
    search.send_keys("blocks.1.up.weight")
    assert "model.blocks.1.up.weight" in shared.find_element(By.ID, "results").text
    search.send_keys(Keys.ENTER)
    assert "model.blocks.1.up.weight" in shared.find_element(By.ID, "details").text
    assert shared.execute_script("return report.graph.selected") in drawn(shared)


def test_searching_for_a_source_line_finds_the_nodes_of_it(shared: Any) -> None:
    search = searching(shared)
    search.send_keys("scaled_dot_product_attention models.py")
    search.send_keys(Keys.ENTER)
    assert "F.scaled_dot_product_attention(" in shared.find_element(By.ID, "details").text


def test_searching_for_what_is_not_there_says_so(shared: Any) -> None:
    searching(shared).send_keys("no such tensor")
    assert "Nothing in the graph" in shared.find_element(By.ID, "results").text


def test_switching_the_pass_shows_its_graph(page: Any, step: Prepared) -> None:
    slider = page.find_element(By.ID, "pass")
    slider.send_keys(Keys.HOME)
    assert "capture" in page.find_element(By.ID, "passname").text
    # Nothing is placed yet.
    assert page.execute_script("return report.graph.graph.nodes.every((node) => node.sbp === '')")
    for _ in range([record.name for record in step.passes].index("box")):
        slider.send_keys(Keys.ARROW_RIGHT)
    assert "box" in page.find_element(By.ID, "passname").text
    graph = next(record for record in step.passes if record.name == "box").graph.graph
    boxing = sum("boxing" in node.meta for node in graph.nodes)
    assert page.execute_script("return report.graph.graph.nodes.filter((node) => node.boxing).length") == boxing


def test_hovering_over_the_peak_names_what_is_held(shared: Any, step: Prepared) -> None:
    ActionChains(shared).move_to_element(shared.find_element(By.ID, "peak")).perform()
    said = tooltip(shared)
    assert "held, the most" in said
    memory = profile(step.graph.graph).memory()
    assert memory.node in said
    assert memory.where.source in said
    assert all(kind in said for kind in memory.kinds)


def test_hovering_over_the_graph_names_a_box(page: Any) -> None:
    box = page.execute_script(
        "const row = report.model.rows.find((row) => row.title === 'model.tokens').id;"
        "const one = report.graph.cy.$id(`c${cellKey(row, FORWARD)}`);"
        "const at = one.renderedPosition(), by = report.graph.element.getBoundingClientRect();"
        "return [at.x + by.left, at.y + by.top]"
    )
    body = page.find_element(By.TAG_NAME, "body")
    width, height = body.size["width"], body.size["height"]
    offset = int(box[0] - width // 2), int(box[1] - height // 2)
    ActionChains(page).move_to_element_with_offset(body, *offset).perform()
    assert "model.tokens" in tooltip(page)


def test_a_contributor_of_the_peak_leads_to_its_node(shared: Any) -> None:
    first = shared.find_element(By.CSS_SELECTOR, "#contributors td .link")
    first.click()
    assert shared.find_element(By.CSS_SELECTOR, "#details h2").text == first.text


def test_the_time_line_can_be_laid_over_nodes_instead(shared: Any) -> None:
    over = shared.find_elements(By.CSS_SELECTOR, "#axis [role=radio]")
    assert over[0].get_attribute("aria-checked") == "true"
    for number in (1, 0):
        shared.find_elements(By.CSS_SELECTOR, "#axis [role=radio]")[number].click()
        checked = shared.find_elements(By.CSS_SELECTOR, "#axis [role=radio]")[number]
        assert checked.get_attribute("aria-checked") == "true"


def test_a_step_without_parameters_time_or_backward_has_its_page(browser: Any, tmp_path: Path) -> None:
    step = Small(nn.ReLU()).prepare(line(2, 0, "ranks"), torch.ones(2, 8))
    report.write(step, tmp_path / "step.html", title="nothing much")
    opened(browser, tmp_path / "step.html")
    assert browser.find_element(By.CSS_SELECTOR, "#axis [role=radio]").get_attribute("disabled")
    assert browser.get_log("browser") == []


def test_names_of_a_module_are_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    step = Small(Hostile()).prepare(line(2, 0, "ranks"), torch.ones(2, 8))
    report.write(step, tmp_path / "step.html", title=HOSTILE)
    opened(browser, tmp_path / "step.html")
    assert browser.find_element(By.TAG_NAME, "h1").text == HOSTILE
    assert any(HOSTILE in title for title in rows(browser))
    assert HOSTILE in browser.find_element(By.ID, "tree").text
    assert browser.get_log("browser") == []
