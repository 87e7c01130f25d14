"""Long commands show their progress on a terminal, and nowhere else."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import zerograph as zg
from tests.inspection import models
from zerograph.__main__ import app
from zerograph.base.progress import Progress, listening, tell
from zerograph.cli import progress
from zerograph.passes.pipeline import PIPELINE

SCRIPT = f"{models.__file__}:example"
PASSES = 1 + len(PIPELINE)


def run(*arguments: str, terminal: bool) -> Result:
    # Rich takes anything for a terminal then.
    return CliRunner().invoke(app, list(arguments), env={"FORCE_COLOR": "1" if terminal else None})


def test_every_pass_is_told_in_order() -> None:
    told: list[Progress] = []
    with listening(told.append):
        models.prepared()
    tell("passes", 0, 1)
    assert [one.done for one in told] == list(range(PASSES + 1))
    assert {(one.of, one.total) for one in told} == {("passes", PASSES)}
    assert [one.doing for one in told] == ["capture", *(one.name for one in PIPELINE), ""]


def test_a_search_tells_its_candidates() -> None:
    told: list[Progress] = []
    with listening(told.append):
        zg.plan(models.Step(layers=1), torch.empty(2, 16, device="meta"), world_size=16, stage="auto", device="h100")
    candidates = [one for one in told if one.of == "candidates"]
    # Four stages on a line of ranks, and on two nodes of eight; with the optimizer on the CPU the three that split it,
    # which need not be compiled where it fits without.
    assert [one.done for one in candidates] == [*range(8), 14]
    assert {one.total for one in candidates} == {14}
    assert candidates[2].doing == "stage 2 on 16 ranks"
    assert candidates[7].doing == "stage 3 on 2x8 ranks"


@pytest.mark.parametrize(
    ("arguments", "bars"),
    [
        (["plan", SCRIPT, "--stage", "1,2", "--world-size", "2"], {"passes": PASSES, "plans": 2}),
        (["plan", SCRIPT, "--stage", "auto", "--world-size", "2"], {"passes": PASSES, "candidates": 7}),
        (["inspect", SCRIPT], {"passes": PASSES}),
        (["inspect", SCRIPT, "--text", "--pass", "box"], {"passes": PASSES, "passes again": PASSES}),
        (["diff", SCRIPT, "--stages", "3,3"], {"passes": PASSES}),
    ],
)
def test_bars_are_on_standard_error_of_a_terminal_only(arguments: list[str], bars: dict[str, int]) -> None:
    found = run(*arguments, "--json", terminal=True)
    assert found.exit_code == 0, found.stderr
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found.stderr).replace("\r", "\n")
    assert dict(re.findall(r"^([a-z ]*?) +\S+ +\d+/(\d+) ", plain, re.M)) == {of: str(n) for of, n in bars.items()}
    assert "\x1b" not in found.stdout
    quiet = run(*arguments, "--json", terminal=False)
    assert all(line.startswith("zerograph: ") for line in quiet.stderr.splitlines())
    assert "\x1b" not in quiet.stderr
    assert numbers(quiet.stdout) == numbers(found.stdout)


def numbers(text: str) -> Any:
    """Return the output without durations."""
    parts = text.splitlines() if text.startswith('{"') else [text]
    return [_without_times(json.loads(part)) for part in parts]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(one) for key, one in value.items() if "seconds" not in key}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def test_without_a_terminal_what_takes_longer_than_a_second_writes_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.05)
    monkeypatch.setattr(progress, "OTHER", 0.05)
    with progress._lines("loading torch"):
        time.sleep(0.3)
        tell("candidates", 3, 14, "stage 2 on 16 ranks")
        time.sleep(1.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "zerograph: loading torch (0 s)"
    assert re.fullmatch(r"zerograph: candidates 3 of 14: stage 2 on 16 ranks \(\d s\)", lines[1])
    # The same again only after long.
    assert len(lines) == 2


def test_what_is_quick_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress._lines("loading torch"):
        tell("candidates", 3, 14, "stage 2 on 16 ranks")
    assert capsys.readouterr().err == ""
