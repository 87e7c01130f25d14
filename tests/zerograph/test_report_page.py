"""The page of a report in a browser: open it, open a module, search, switch the pass, hover over the peak."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from tests.zerograph.test_report import HOSTILE, Hostile, Small, prepared
from zerograph.inspection import report
from zerograph.inspection.step import Prepared
from zerograph.ir.memory import profile
from zerograph.ir.mesh import line

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


# ---- reading the page


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a GPT of five equal layers."""
    written = tmp_path_factory.mktemp("deep") / "step.html"
    report.write(prepared(1, layers=5), written, title="TrainGpt", machine="h100")
    return written


@pytest.fixture
def narrow(browser: Any, deep: Path) -> Iterator[Any]:
    """The page on a screen of 420 x 900 pixels."""
    screen = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(browser, deep)
    yield browser
    assert browser.get_log("browser") == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def folded(page: Any) -> Any:
    return page.execute_script("return report.model.rows.filter((row) => row.kind === 'fold')")


def test_arrow_keys_go_through_the_modules_before_any_click(page: Any) -> None:
    ActionChains(page).send_keys(Keys.ARROW_DOWN).perform()
    second = page.switch_to.active_element.get_attribute("data-row")
    assert int(second) == page.execute_script("return report.graph.visible[1].row")
    ActionChains(page).send_keys(Keys.ARROW_DOWN).perform()
    third = page.switch_to.active_element.get_attribute("data-row")
    assert int(third) == page.execute_script("return report.graph.visible[2].row")


def test_keys_act_on_the_row_that_tab_reached(page: Any) -> None:
    page.execute_script("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    ActionChains(page).send_keys(Keys.END).perform()
    last = page.switch_to.active_element.get_attribute("data-row")
    assert int(last) == page.execute_script("return report.graph.visible.at(-1).row")


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


def test_the_legend_names_the_colours_of_compute_and_collectives(page: Any) -> None:
    legend = page.find_element(By.ID, "kinds").text
    drawn_kinds = page.execute_script("return [...new Set(report.charts.byTime.map(eventColor))]")
    assert {"--forward", "--backward", "--update", "--all-gather", "--reduce-scatter"} <= set(drawn_kinds)
    names = {"--waits": "waiting"}
    for color in drawn_kinds:
        assert names.get(color, color.removeprefix("--")) in legend


def test_equal_layers_are_one_row_until_it_is_clicked(browser: Any, deep: Path) -> None:
    opened(browser, deep)
    (fold,) = folded(browser)
    assert fold["times"] == 5
    assert "\N{MULTIPLICATION SIGN}5" in browser.find_element(By.CSS_SELECTOR, f'[data-row="{fold["id"]}"]').text
    layers = [f"model.blocks.{number}" for number in range(5)]
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
    assert hidden >= 5
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


def test_the_page_speaks_of_predictions(page: Any) -> None:
    text = page.find_element(By.TAG_NAME, "body").text
    page.find_element(By.ID, "pass").send_keys(Keys.HOME)
    text += page.find_element(By.ID, "graph").text
    assert "predicted" in text
    assert "not placed yet" in text
    assert "no change" in text
    for word in ("foretold", "seen by", "no SBP yet", "nothing to do here", "computed again", "made by"):
        assert word not in text


# ---- two steps side by side


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("two") / "steps.html"
    report.write(prepared(1, stage=2), written, title="TrainGpt", machine="h100", beside=prepared(1, layers=3))
    return written


def test_two_steps_stand_side_by_side(browser: Any, two: Path) -> None:
    opened(browser, two)
    frames = browser.find_elements(By.TAG_NAME, "iframe")
    assert [frame.get_attribute("title") for frame in frames] == ["TrainGpt, stage 2", "TrainGpt, stage 3"]
    boxes = [frame.rect for frame in frames]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert boxes[0]["y"] == boxes[1]["y"]
    # However wide the table of facts is; widths are rounded.
    assert boxes[1]["x"] + boxes[1]["width"] <= browser.execute_script("return innerWidth") + 1
    for frame, stage in zip(frames, (2, 3), strict=True):
        browser.switch_to.frame(frame)
        assert browser.execute_script("return report.model.data.facts[0][1]") == f"ZeRO stage {stage}"
        assert browser.find_element(By.ID, "canvas").is_displayed()
        assert browser.find_element(By.ID, "drawn").is_displayed()
        browser.switch_to.default_content()
    assert browser.get_log("browser") == []


def test_steps_side_by_side_are_compared_in_numbers(browser: Any, two: Path) -> None:
    opened(browser, two)
    labels, *steps = [
        [cell.text for cell in line.find_elements(By.CSS_SELECTOR, "th, td")]
        for line in browser.find_elements(By.CSS_SELECTOR, "#compared tr")
    ]
    peaks = browser.execute_script("return reports.map((one) => one.model.data.peak)")
    ratio = 100 * (peaks[1] / peaks[0] - 1)
    shown = steps[1][labels.index("predicted peak")]
    digits = 1 if abs(ratio) < 10 else 0
    assert shown.endswith(f" {'+' if ratio > 0 else chr(8722)}{abs(ratio):.{digits}f} %")
    assert steps[0][labels.index("ranks")] == steps[1][labels.index("ranks")] == "4"


def test_what_is_done_in_one_step_is_done_in_the_other(browser: Any, two: Path) -> None:
    opened(browser, two)
    titles = "return reports.map((one) => one.graph.visible.map((place) => one.model.rows[place.row].title))"
    frames = browser.find_elements(By.TAG_NAME, "iframe")
    browser.switch_to.frame(frames[0])
    browser.find_element(By.ID, "collapse").click()
    browser.find_element(By.ID, "pass").send_keys(Keys.HOME)
    browser.switch_to.default_content()
    assert browser.execute_script("return reports.map((one) => one.graph.pass)") == [0, 0]
    assert browser.execute_script(titles)[1] == browser.execute_script(titles)[0]
    browser.switch_to.frame(frames[1])
    row(browser, "model").click()
    browser.switch_to.default_content()
    assert all("model.norm" in shown for shown in browser.execute_script(titles))


def test_steps_side_by_side_have_one_scale(browser: Any, two: Path) -> None:
    opened(browser, two)
    scales = browser.execute_script("return reports.map((one) => [one.charts.most, one.charts.end])")
    assert scales[0] == scales[1]
    own = browser.execute_script("return reports.map((one) => [one.charts.peakBytes, one.charts.ownEnd])")
    assert scales[0] == [max(one[0] for one in own), max(one[1] for one in own)]


def test_a_narrow_screen_has_both_steps(browser: Any, two: Path) -> None:
    screen = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        opened(browser, two)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 420
        upper, lower = (frame.rect for frame in browser.find_elements(By.TAG_NAME, "iframe"))
        assert upper["y"] + upper["height"] <= lower["y"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# ---- pictures of it


def saved(page: Any, button: Any, folder: Path) -> Path:
    """Click a button, and return the file that the browser saved."""
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    button.click()
    eventually(lambda: [one for one in folder.iterdir() if one.suffix in (".svg", ".png")])
    (file,) = folder.iterdir()
    return file


def test_the_graph_is_saved_as_svg_with_all_that_is_open(page: Any, tmp_path: Path) -> None:
    file = saved(page, page.find_element(By.ID, "svg"), tmp_path)
    assert file.name == "TrainGpt-fit_memory_budget.svg"
    drawing = ElementTree.parse(file).getroot()
    texts = [one.text or "" for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "TrainGpt: the graph after fit_memory_budget"
    assert any("written" in text for text in texts)
    labels = page.execute_script("return report.graph.visible.map((one) => report.model.rows[one.row].label)")
    # Also of rows below the edge of the screen.
    assert all(any(text.endswith(label[-6:]) for text in texts) for label in labels)
    shapes = [*drawing.iter("{http://www.w3.org/2000/svg}polygon")]
    assert len(shapes) == page.execute_script("return report.graph.cy.nodes('.boxing').length")


def test_the_graph_is_saved_as_png(page: Any, tmp_path: Path) -> None:
    content = saved(page, page.find_element(By.ID, "png"), tmp_path).read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert min(width, height) > 500


def test_the_chart_is_saved_as_svg_with_its_legend(page: Any, tmp_path: Path) -> None:
    (button,) = [one for one in page.find_elements(By.CSS_SELECTOR, "#axis button") if one.text == "SVG"]
    file = saved(page, button, tmp_path)
    drawing = ElementTree.parse(file).getroot()
    texts = {one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"activations", "forward", "backward", "all-gather", "compute", "collectives"} <= texts
    assert page.find_element(By.ID, "peak").text in texts
    colors = {one.get("fill") for one in drawing.iter("{http://www.w3.org/2000/svg}rect")}
    assert page.execute_script("return palette()('--memory-activations')") in colors


def test_a_picture_has_hostile_names_as_text(browser: Any, tmp_path: Path) -> None:
    step = Small(Hostile()).prepare(line(2, 0, "ranks"), torch.ones(2, 8))
    report.write(step, tmp_path / "step.html", title=HOSTILE)
    opened(browser, tmp_path / "step.html")
    for draw in ("graphSvg", "chartSvg"):
        drawing = ElementTree.fromstring(browser.execute_script(f"return {draw}(report)"))
        assert not list(drawing.iter("script"))
        assert any(HOSTILE in (one.text or "") for one in drawing.iter("{http://www.w3.org/2000/svg}text"))


def test_names_of_passes_do_not_overlap(page: Any) -> None:
    boxes = page.execute_script(
        "return [...document.querySelectorAll('#ticks span')].filter((one) => one.style.visibility !== 'hidden')"
        ".map((one) => { const box = one.getBoundingClientRect(); return [box.top, box.left, box.right]; })"
    )
    assert len(boxes) > 5
    rows: dict[float, list[tuple[float, float]]] = {}
    for top, left, right in boxes:
        rows.setdefault(top, []).append((left, right))
    for row in rows.values():
        spans = sorted(row)
        assert all(right < left for (_, right), (left, _) in itertools.pairwise(spans))
