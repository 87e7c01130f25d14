"""The page of a report in a browser: opened, and read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

__all__ = [
    "ActionChains",
    "By",
    "Keys",
    "drawn",
    "eventually",
    "folded",
    "opened",
    "row",
    "rows",
    "still_open",
    "tooltip",
]


def opened(browser: Any, path: Path) -> None:
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(path.as_uri())
    eventually(lambda: browser.execute_script("return document.documentElement.dataset.ready !== undefined"))
    browser.shared = None


def still_open(browser: Any, path: Path) -> None:
    """Open a page unless it is open, and nothing but tests that do so themselves has touched it."""
    if getattr(browser, "shared", None) != path:
        opened(browser, path)
        browser.shared = path


def eventually(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until it is true: the machine may be busy."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)


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


def folded(page: Any) -> Any:
    return page.execute_script("return report.model.rows.filter((row) => row.kind === 'fold')")
