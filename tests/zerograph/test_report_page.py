"""The page of a report in a browser: open it, open a module, search, switch the pass, hover over the peak."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zerograph.test_report import HOSTILE, Hostile, Small, prepared
from zerograph import report
from zerograph.inspection.step import Prepared
from zerograph.memory import profile
from zerograph.mesh import line

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium or chromedriver is not installed")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def step() -> Prepared:
    return prepared(1)


@pytest.fixture(scope="module")
def path(step: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "step.html"
    report.write(step, written, title="TrainGpt", machine="h100")
    return written


def opened(browser: Any, path: Path) -> None:
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(path.as_uri())
    eventually(lambda: browser.execute_script("return document.documentElement.dataset.ready !== undefined"))


def eventually(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until it is true: the machine may be busy."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)


@pytest.fixture
def page(browser: Any, path: Path) -> Iterator[Any]:
    """The page just opened; what it complains about afterwards is a failure."""
    opened(browser, path)
    yield browser
    assert browser.get_log("browser") == []


def rows(page: Any) -> list[str]:
    return page.execute_script("return report.graph.visible.map((one) => report.model.rows[one.row].title)")


def row(page: Any, title: str) -> Any:
    found = page.execute_script("return report.model.rows.find((row) => row.title === arguments[0]).id", title)
    page.execute_script("report.graph.focus(arguments[0], true)", found)
    return page.find_element(By.CSS_SELECTOR, f'[data-row="{found}"]')


def drawn(page: Any) -> set[str]:
    """Names of the nodes that are drawn one by one."""
    found = "report.graph.cy.nodes().filter((one) => one.data('node') !== undefined)"
    return set(page.execute_script(f"return {found}.map((one) => report.graph.graph.nodes[one.data('node')].name)"))


def tooltip(page: Any) -> str:
    found: str = page.find_element(By.ID, "tooltip").text
    return found


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


def test_searching_for_a_parameter_finds_its_use(page: Any) -> None:
    search = page.find_element(By.ID, "search")
    search.send_keys("blocks.1.up.weight")
    assert "model.blocks.1.up.weight" in page.find_element(By.ID, "results").text
    search.send_keys(Keys.ENTER)
    assert "model.blocks.1.up.weight" in page.find_element(By.ID, "details").text
    assert page.execute_script("return report.graph.selected") in drawn(page)


def test_searching_for_a_source_line_finds_the_nodes_of_it(page: Any) -> None:
    search = page.find_element(By.ID, "search")
    search.send_keys("scaled_dot_product_attention models.py")
    search.send_keys(Keys.ENTER)
    assert "F.scaled_dot_product_attention(" in page.find_element(By.ID, "details").text


def test_searching_for_what_is_not_there_says_so(page: Any) -> None:
    page.find_element(By.ID, "search").send_keys("no such tensor")
    assert "Nothing in the graph" in page.find_element(By.ID, "results").text


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


def test_hovering_over_the_peak_names_what_is_held(page: Any, step: Prepared) -> None:
    ActionChains(page).move_to_element(page.find_element(By.ID, "peak")).perform()
    said = tooltip(page)
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


def test_a_contributor_of_the_peak_leads_to_its_node(page: Any) -> None:
    first = page.find_element(By.CSS_SELECTOR, "#contributors td .link")
    first.click()
    assert page.find_element(By.CSS_SELECTOR, "#details h2").text == first.text


def test_the_time_line_can_be_laid_over_nodes_instead(page: Any) -> None:
    over = page.find_elements(By.CSS_SELECTOR, "#axis [role=radio]")
    assert over[0].get_attribute("aria-checked") == "true"
    over[1].click()
    assert page.find_elements(By.CSS_SELECTOR, "#axis [role=radio]")[1].get_attribute("aria-checked") == "true"


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
