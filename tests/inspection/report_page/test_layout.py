"""Layout of a report's page: rows, names, legend, narrow screens."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.inspection.report_page.browser import ActionChains, By, Keys, folded, opened, row, rows
from tests.inspection.test_report import Small
from zerograph.inspection import report
from zerograph.ir.mesh import line


def test_arrow_keys_go_through_the_modules_before_any_click(page: Any) -> None:
    ActionChains(page).send_keys(Keys.ARROW_DOWN).perform()
    second = page.switch_to.active_element.get_attribute("data-row")
    assert int(second) == page.execute_script("return report.graph.visible[1].row")
    ActionChains(page).send_keys(Keys.ARROW_DOWN).perform()
    third = page.switch_to.active_element.get_attribute("data-row")
    assert int(third) == page.execute_script("return report.graph.visible[2].row")


def test_after_a_jump_to_the_peak_the_open_row_is_named_beside_it(page: Any) -> None:
    page.find_element(By.ID, "peak").click()
    place = page.execute_script(
        "const node = report.graph.graph.nodes[report.graph.graph.byText.get(report.graph.selected)];"
        "return {row: node.row, top: report.graph.y(report.graph.places.get(node.row).top)}"
    )
    # Otherwise the head is in the picture anyway, and nothing is shown here.
    assert place["top"] < 0
    head = page.find_element(By.CSS_SELECTOR, f'#tree [data-row="{place["row"]}"]')
    tree = page.find_element(By.ID, "tree")
    assert head.location["y"] >= tree.location["y"]
    assert "pinned" in head.get_attribute("class")


def test_the_column_of_modules_cannot_be_scrolled_out_of_line(browser: Any, deep: Path) -> None:
    opened(browser, deep)
    for fold in folded(browser):
        browser.execute_script("report.graph.toggle(arguments[0].id, true)", fold)
    below = browser.execute_script("return report.graph.tree.lastElementChild.getBoundingClientRect().bottom")
    assert below > browser.execute_script("return report.graph.tree.getBoundingClientRect().bottom")
    scrolled = browser.execute_script(
        "const tree = document.getElementById('tree'), graph = document.getElementById('graph');"
        "tree.scrollTop = graph.scrollTop = 50; tree.lastElementChild.scrollIntoView();"
        "return [tree.scrollTop, graph.scrollTop]"
    )
    assert scrolled == [0, 0]


def test_a_dragged_picture_stays_within_its_bounds(page: Any) -> None:
    canvas = page.find_element(By.ID, "canvas")
    page.execute_script("window.panned = 0; report.graph.cy.on('dragpan', () => panned++)")
    drag = ActionChains(page).move_to_element_with_offset(canvas, -150, 60).click_and_hold()
    for _ in range(8):
        drag = drag.move_by_offset(20, 15)
    drag.release().perform()
    assert page.execute_script("return panned") > 0
    pan = page.execute_script("return report.graph.cy.pan()")
    assert pan["x"] <= 10
    assert pan["y"] <= 28


def test_a_name_is_shown_before_the_file_beside_it(browser: Any, tmp_path: Path) -> None:
    model: nn.Module = nn.Linear(8, 8)
    for depth in range(6):
        model = nn.Sequential(OrderedDict([(f"module_with_a_name_{depth}", model)]))
    step = Small(model).prepare(line(2, 0, "ranks"), torch.ones(2, 8))
    report.write(step, tmp_path / "step.html", title="deep")
    opened(browser, tmp_path / "step.html")
    row(browser, "model" + "".join(f".module_with_a_name_{depth}" for depth in reversed(range(6))))
    assert browser.find_elements(By.CSS_SELECTOR, "#tree .row small")
    widths = browser.execute_script(
        "return [...document.querySelectorAll('#tree .row .name')].map((one) => [one.clientWidth, one.scrollWidth])"
    )
    assert len(widths) >= 6
    assert all(shown >= min(whole, 60) for shown, whole in widths)


def test_equal_layers_are_one_row_until_it_is_clicked(browser: Any, deep: Path) -> None:
    opened(browser, deep)
    (fold,) = folded(browser)
    assert fold["times"] == 4
    assert "\N{MULTIPLICATION SIGN}4" in browser.find_element(By.CSS_SELECTOR, f'[data-row="{fold["id"]}"]').text
    layers = [f"model.blocks.{number}" for number in range(4)]
    assert not set(layers) & set(rows(browser))
    browser.find_element(By.CSS_SELECTOR, f'[data-row="{fold["id"]}"]').click()
    assert set(layers) <= set(rows(browser))


def test_layers_that_differ_are_not_folded(browser: Any, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(width, width + 1) for width in range(4, 8)))
    step = Small(model).prepare(line(2, 0, "ranks"), torch.ones(2, 4))
    report.write(step, tmp_path / "step.html", title="widths")
    opened(browser, tmp_path / "step.html")
    assert folded(browser) == []


def test_edges_of_constants_are_hidden_until_hovered(browser: Any, deep: Path) -> None:
    opened(browser, deep)
    browser.execute_script("report.graph.toggle(arguments[0].id)", folded(browser)[0])
    found = "report.graph.graph.nodes.find((node) => node.op === 'hyperparameter')"
    shown = f"const one = report.graph.cy.$id(report.graph.shownAs[{found}.index]);"
    opacities = "return one.outgoers('edge').map((edge) => edge.numericStyle('opacity'))"
    hidden = browser.execute_script(shown + "return one.outgoers('edge.constant').length")
    assert hidden >= 4
    assert browser.execute_script(shown + opacities).count(0) == hidden
    assert 0 not in browser.execute_script(shown + "report.graph.near(one);" + opacities)


def test_on_a_narrow_screen_everything_is_there(narrow: Any) -> None:
    widths = narrow.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1] == 420
    for name in ("facts", "search", "pass", "tree", "canvas", "details", "contributors", "drawn", "axis"):
        assert narrow.find_element(By.ID, name).is_displayed(), name
    assert narrow.find_element(By.ID, "pass").size["width"] > 250
    outside = "return [...document.querySelectorAll('button')].filter((one) => one.getBoundingClientRect().right > 420)"
    assert narrow.execute_script(outside) == []


def test_on_a_narrow_screen_a_tap_shows_what_was_tapped(narrow: Any) -> None:
    narrow.execute_script("report.graph.reveal(report.graph.graph.nodes.find((node) => node.op === 'embedding').index)")
    title = narrow.find_element(By.CSS_SELECTOR, "#details h2")
    assert title.text == "embedding"
    assert narrow.execute_script(
        "const box = arguments[0].getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight", title
    )


def test_on_a_narrow_screen_the_row_of_the_peak_keeps_its_name(narrow: Any) -> None:
    narrow.find_element(By.ID, "peak").click()
    names = narrow.execute_script(
        "return [...document.querySelectorAll('#tree .row .name')].filter((one) => {"
        " const box = one.getBoundingClientRect(); return box.height > 6 && box.top >= 0 && box.bottom <= innerHeight;"
        "}).map((one) => one.textContent)"
    )
    node = "report.graph.graph.nodes[report.charts.memory.peak]"
    path = narrow.execute_script(f"return report.model.path({node}.row)")
    assert any(path.endswith(name.lstrip("…")) for name in names), (path, names)


def test_the_page_speaks_of_predictions(page: Any) -> None:
    text = page.find_element(By.TAG_NAME, "body").text
    page.find_element(By.ID, "pass").send_keys(Keys.HOME)
    text += page.find_element(By.ID, "graph").text
    assert "predicted" in text
    assert "not placed yet" in text
    assert "no change" in text
    for word in ("foretold", "seen by", "no SBP yet", "nothing to do here", "computed again", "made by"):
        assert word not in text


def test_keys_act_on_the_row_that_tab_reached(shared: Any) -> None:
    shared.execute_script("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    ActionChains(shared).send_keys(Keys.END).perform()
    last = shared.switch_to.active_element.get_attribute("data-row")
    assert int(last) == shared.execute_script("return report.graph.visible.at(-1).row")


def test_the_legend_names_the_colours_of_compute_and_collectives(shared: Any) -> None:
    legend = shared.find_element(By.ID, "kinds").text
    drawn_kinds = shared.execute_script("return [...new Set(report.charts.byTime.map(eventColor))]")
    assert {"--forward", "--backward", "--update", "--all-gather", "--reduce-scatter"} <= set(drawn_kinds)
    assert all(color.removeprefix("--") in legend for color in drawn_kinds)


def test_names_of_passes_do_not_overlap(shared: Any) -> None:
    boxes = shared.execute_script(
        "return [...document.querySelectorAll('#ticks span')].filter((one) => one.style.visibility !== 'hidden')"
        ".map((one) => { const box = one.getBoundingClientRect(); return [box.top, box.left, box.right]; })"
    )
    assert len(boxes) > 5
    lines: dict[float, list[tuple[float, float]]] = {}
    for top, left, right in boxes:
        lines.setdefault(top, []).append((left, right))
    for spans in map(sorted, lines.values()):
        assert all(right < left for (_, right), (left, _) in itertools.pairwise(spans))
