"""``zerograph plan``: what it prints for people and for machines, and what it ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerograph.__main__ import app

SCRIPT = """
import torch
import zerograph as zg

class Step(zg.ZeroGraph):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(64, 64)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

def planned():
    return Step(), torch.zeros(8, 64)

def misshapen():
    return Step(), torch.zeros(8, 63)

def listed():
    return Step(), [torch.zeros(8, 64)]

def wrong():
    return 7

if __name__ == "__main__":
    raise AssertionError("run")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script_of_a_plan.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_a_plan_of_a_script(script: str, tmp_path: Path) -> None:
    code, shown = run(f"{script}:planned", "--world-size", "4", "--stage", "3", "--plot", str(tmp_path / "p.png"))
    assert code == 0, shown
    assert "4,160 parameters on 4 ranks" in shown
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_for_machines(script: str) -> None:
    code, shown = run(f"{script}:planned", "--world-size", "2,4", "--stage", "2", "--json")
    plans = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert code == 0
    assert [plan["world_size"] for plan in plans] == [2, 4]


def test_what_does_not_fit_ends_with_1(script: str) -> None:
    assert run(f"{script}:planned", "--stage", "auto", "--fit", "1KiB")[0] == 1
    assert run("--params", "7.5e9", "--fit", "1GiB")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--params", "1e9", "--world-size", "eight"],
        ["--params", "1e9", "--fit", "much"],
        ["--params", "-1"],
        ["--params", "nan"],
        ["--params", "inf"],
        ["nowhere.py:planned"],
    ],
)
def test_wrong_use_ends_with_2(arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize("command", ["plan", "inspect"])
@pytest.mark.parametrize(("step", "why"), [("misshapen", "RuntimeError: "), ("listed", "TypeError: linear()")])
def test_a_build_that_fails_is_told_with_its_line(script: str, command: str, step: str, why: str) -> None:
    found = CliRunner().invoke(app, [command, f"{script}:{step}"])
    assert found.exit_code == 2
    assert found.stderr.startswith(f"Step failed while it was traced: {why}")
    assert found.stderr.endswith("script_of_a_plan.py:12   loss = self.model(x).square().mean()\n")
    assert len(found.stderr.splitlines()) == 2


def test_a_bug_is_no_answer(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerograph.planner.plan.profile", None)
    found = CliRunner().invoke(app, ["plan", f"{script}:planned"])
    assert found.exit_code == 2
    assert "Traceback" in found.stderr


def test_a_name_that_is_no_step(script: str) -> None:
    code, shown = run(f"{script}:wrong")
    assert code == 2
    assert "(step, inputs)" in shown
    code, shown = run(f"{script}:plan")
    assert code == 2
    assert "planned" in shown


def test_the_closed_form() -> None:
    code, shown = run("--params", "7.5e9", "--world-size", "1,4,16,64,256,1024")
    row = next(line for line in shown.splitlines() if line.split()[:1] == ["64"])
    assert row.split() == ["64", "120", "31.4", "16.6", "1.88"]
    assert code == 0
