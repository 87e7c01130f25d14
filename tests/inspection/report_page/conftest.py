"""A browser for all tests of the page, and pages to open in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inspection.test_report import prepared
from zerograph.inspection import report
from zerograph.inspection.step import Prepared

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,800"),
)


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a browser of our own, beside any that is open; skip where none can be started."""
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    program = shutil.which("chromedriver")
    if chromium is None or program is None:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(program))
    except WebDriverException as error:
        pytest.skip(f"no browser can be started: {error.msg}")
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="package")
def step() -> Prepared:
    return prepared(1)


@pytest.fixture(scope="package")
def path(step: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "step.html"
    report.write(step, written, title="TrainGpt", machine="h100")
    return written


@pytest.fixture(scope="package")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a GPT of four equal layers."""
    written = tmp_path_factory.mktemp("deep") / "step.html"
    report.write(prepared(1, layers=4), written, title="TrainGpt", machine="h100")
    return written


def shown(browser: Any, path: Path, opens: str) -> Iterator[Any]:
    """Yield a page; what it complains about afterwards is a failure."""
    from tests.inspection.report_page import browser as pages

    getattr(pages, opens)(browser, path)
    yield browser
    assert browser.get_log("browser") == []


@pytest.fixture
def page(browser: Any, path: Path) -> Iterator[Any]:
    """The page just opened."""
    yield from shown(browser, path, "opened")


@pytest.fixture
def shared(browser: Any, path: Path) -> Iterator[Any]:
    """The page as other tests that share it have left it: something may be selected, and no module is closed."""
    yield from shown(browser, path, "still_open")


@pytest.fixture
def narrow(browser: Any, deep: Path) -> Iterator[Any]:
    """The page on a screen of 420 x 900 pixels, as other tests of it have left it."""
    screen = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    yield from shown(browser, deep, "still_open")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
