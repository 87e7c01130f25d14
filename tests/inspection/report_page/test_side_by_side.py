"""Two steps on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.inspection.report_page.browser import By, Keys, opened, row, still_open
from tests.inspection.test_report import prepared
from zerograph.inspection import report


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("two") / "steps.html"
    report.write(prepared(1, stage=2), written, title="TrainGpt", machine="h100", beside=prepared(1, layers=3))
    return written


def test_two_steps_stand_side_by_side(browser: Any, two: Path) -> None:
    still_open(browser, two)
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
    still_open(browser, two)
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


def test_steps_side_by_side_have_one_scale(browser: Any, two: Path) -> None:
    still_open(browser, two)
    scales = browser.execute_script("return reports.map((one) => [one.charts.most, one.charts.end])")
    assert scales[0] == scales[1]
    own = browser.execute_script("return reports.map((one) => [one.charts.peakBytes, one.charts.ownEnd])")
    assert scales[0] == [max(one[0] for one in own), max(one[1] for one in own)]


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
