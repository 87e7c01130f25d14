"""Device of these tests, their order, their time limit, and a JSON line for each result."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import FOLDER

# Most telling first: what a time limit cuts off is what is known best.
ORDER = ("families", "waiting", "captures", "two_ranks", "trainer", "options", "attention", "offload")
# A test that takes longer on a card hangs.
PATIENCE = 120


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist get the options as the controller has them here.
    if config.option.seconds is not None and config.option.end is None:
        config.option.end = time.time() + config.option.seconds
    if config.option.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder by module, where they stand."""
    places = [number for number, item in enumerate(items) if FOLDER in item.path.parents]
    own = sorted((items[number] for number in places), key=lambda item: ORDER.index(item.path.stem[5:]))
    for number, item in zip(places, own, strict=True):
        items[number] = item


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.option.device or "cpu"


@pytest.fixture
def card(device: str) -> str:
    """The device; a test that shows something of an accelerator is skipped on the CPU."""
    if device == "cpu":
        pytest.skip("says something about an accelerator only")
    return device


@pytest.fixture(scope="session")
def steps(request: pytest.FixtureRequest) -> int:
    """The number of steps of a comparison."""
    return 2 if request.config.option.device is None or request.config.option.tiny else 4


@pytest.fixture(autouse=True)
def _limits(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    end = request.config.option.end
    if end is not None and time.time() > end:
        pytest.skip("out of time")
    if device == "cpu" or threading.current_thread() is not threading.main_thread():
        yield
        return
    torch.backends.cudnn.allow_tf32 = False

    def hangs(*_: object) -> None:
        raise TimeoutError(f"no end after {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Results:
    """Append a line of JSON for each test as soon as it has ended."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed and not report.skipped:
            return
        if report.when == "teardown" and not report.failed:
            return
        row: dict[str, Any] = {"kind": "test", "name": report.nodeid.partition("gpu/")[2], "outcome": report.outcome}
        row |= {"seconds": round(report.duration, 2), **dict(report.user_properties)}
        if report.failed:
            row["error"] = report.longreprtext[-2000:]
        elif report.skipped:
            row["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        with self.file.open("a") as lines:
            lines.write(json.dumps(row, default=str) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    results = session.config.option.results
    if results is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Results(Path(results)))
