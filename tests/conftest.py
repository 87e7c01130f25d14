"""Fixtures of the whole suite."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.faults.survival_table import PROPERTY, table
from tests.gpu import FOLDER as GPU
from tests.pool import COLLECTIONS, Pool, SharedJobs
from zerograph.compiler import step_cache

# Tests of the cache of steps turn it on for themselves.
os.environ[step_cache.VARIABLE] = "0"
# A shell ignores SIGINT for what it runs in the background, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# pytest listens to loggers that do not propagate. If anybody listens to this one, torch walks the stack for a record.
logging.getLogger("torch.__trace").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts of tests/passes/golden anew")
    parser.addoption("--long", action="store_true", help="also what is marked long: minutes to hours")
    # Of tests/gpu; here, because only options of the outermost conftest are known from every folder.
    parser.addoption("--device", choices=("cuda", "cpu"), help="run all of tests/gpu on this device")
    parser.addoption("--tiny", action="store_true", help="only the slice of tests/gpu that runs without --device")
    parser.addoption("--seconds", type=float, help="begin no test of tests/gpu after so many seconds")
    parser.addoption("--end", type=float, help=argparse.SUPPRESS)
    parser.addoption("--results", help="a file for a JSON line about each test of tests/gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    whole = GPU if config.getoption("--device") and not config.getoption("--tiny") else None
    left_out = {item for item in items if item.get_closest_marker("long") and whole not in item.path.parents}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of later garbage collections, and make these rarer."""
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of faults: each, and its outcome."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    found = [
        text
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, text in report.user_properties
        if name == PROPERTY
    ]
    if found:
        terminalreporter.section("faults")
        console = Console(width=terminalreporter._tw.fullwidth)
        with console.capture() as shown:
            console.print(table(found))
        terminalreporter.write(shown.get())


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: disks may take seconds to sync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    """One pool of worker processes for the whole run."""
    pool = Pool()
    yield pool
    pool.close(patience=60.0)


@pytest.fixture(scope="session")
def pool(workers: Pool) -> SharedJobs:
    """The pool, whose calls share jobs: to form one takes tens of milliseconds, mostly of waiting.

    Folders that test jobs have ``workers`` instead, of which each call has a job of its own.
    """
    return SharedJobs(workers)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The machine's few cores belong to the workers; and sums come out in one order."""
    torch.set_num_threads(1)
