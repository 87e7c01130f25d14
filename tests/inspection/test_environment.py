"""ZEROGRAPH_DUMP and ZEROGRAPH_LOGS."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.inspection.models import Step, prepared
from zerograph.errors import ConfigError, MemoryBudgetError
from zerograph.inspection import logs
from zerograph.ir.mesh import line
from zerograph.passes.pipeline import PIPELINE


def test_a_dump_has_the_graph_after_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGRAPH_DUMP", str(tmp_path))
    step = prepared(layers=1, rank=1)
    (folder,) = (tmp_path / "rank1").iterdir()
    names = ["capture", *(one.name for one in PIPELINE)]
    assert {path.name for path in folder.iterdir()} == {
        "step.txt",
        *(f"{number:02d}-{name}.txt" for number, name in enumerate(names)),
    }
    for name in ("box", "fit_memory_budget"):
        lines = (folder / f"{names.index(name):02d}-{name}.txt").read_text().splitlines()
        assert [line for line in lines if not line.startswith("# ")] == step.text(name).splitlines()


def test_a_memory_budget_that_cannot_be_kept_is_no_failure_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROGRAPH_DUMP", str(tmp_path))
    step = Step(layers=1)
    step.config.memory.memory_budget = 1000
    with pytest.raises(MemoryBudgetError):
        step.prepare(line(2, 0, "ranks"), torch.empty(2, 16, device="meta"))
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_a_dump_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROGRAPH_DUMP", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"ZEROGRAPH_DUMP=.*cannot be written"):
        prepared(layers=1)


@pytest.mark.parametrize(("name", "logged"), [("", False), ("zerograph", True), ("zerograph.memory", True)])
def test_the_root_loggers_level_alone_logs_no_compilation(
    name: str, *, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=name or None):
        prepared(layers=1)
    assert ("zerograph.memory" in {record.name for record in caplog.records}) == logged


def test_logs_say_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZEROGRAPH_LOGS", "+collectives,memory")
    try:
        step = prepared(layers=1)
    finally:
        monkeypatch.delenv("ZEROGRAPH_LOGS")
        logs.configure()
    said = capsys.readouterr().err
    assert all(one.node in said for one in step.collectives())
    assert "[zerograph.memory]" in said
    assert "[zerograph.passes]" not in said
    assert not logging.getLogger("zerograph.collectives").isEnabledFor(logging.DEBUG)


def test_a_log_that_there_is_not_is_an_error_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"no log 'pases'; did you mean 'passes'.*\n.*collectives, memory"):
        logs.parse("pases,memory")
    assert logs.parse("+all,-memory")["memory"] == logging.ERROR
