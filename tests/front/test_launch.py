"""The README's programs, as their reader would run them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import zerograph as zg
from tests.harness import sliced
from tests.pool import Pool
from tests.scripts import run_by_torchruns_agent
from zerograph.__main__ import app

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def saved(section: str, file: Path) -> Path:
    """Write the program of a section of the README to a file."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text().split(f"## {section}")[1], re.DOTALL)
    assert found
    file.write_text(found.group(1))
    return file


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return saved("A training step", tmp_path / "train.py")


def test_the_readmes_commands_work_with_its_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text().replace("\n", "\x00")
    said = re.findall(r"zerograph (?:plan|inspect|diff) train\.py:example[^`#\x00]*", readme)
    assert {command.split()[1] for command in said} == {"plan", "inspect", "diff"}
    monkeypatch.chdir(program.parent)
    for command in dict.fromkeys(said):
        found = CliRunner().invoke(app, shlex.split(command)[1:])
        # Stages differ, which diff's exit code says.
        assert found.exit_code == (1 if command.startswith("zerograph diff") else 0), (command, found.output)
        assert "while the script was imported" not in found.stderr


def printed_by_torchrun(program: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [*TORCHRUN, str(program)], cwd=program.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return checked(result.stdout, result.stderr)


def printed_by_its_agent(program: Path) -> str:
    printed = run_by_torchruns_agent(program.parent / "logs", [str(program)])
    return checked(printed["stdout"], printed["stderr"])


def checked(printed: str, errors: str) -> str:
    # torch complains about a process group that nobody destroyed, and so on.
    assert "Warning" not in errors
    assert "destroy_process_group" not in errors
    return printed


def alone(program: Path) -> str:
    """Return its output without a launcher."""
    dist.destroy_process_group()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(action="error"):
        runpy.run_path(str(program), run_name="__main__")
    return printed.getvalue()


@sliced("launched", [printed_by_its_agent], [printed_by_torchrun])
def test_the_readme_runs_with_and_without_a_launcher(
    pool: Pool, program: Path, launched: Callable[[Path], str]
) -> None:
    single, both = pool.run_afresh(1, alone, program)[0], launched(program)
    assert "rank 0 of 1" in single
    assert "rank 0 of 2" in both
    assert float(single.split()[1]) == pytest.approx(float(both.split()[1]), abs=2e-4)


@sliced("launched", [printed_by_its_agent], [printed_by_torchrun])
def test_the_readmes_loop_prints_the_loss_of_one_rank_on_two(
    pool: Pool, tmp_path: Path, launched: Callable[[Path], str]
) -> None:
    loop = saved("One line", tmp_path / "loop.py")
    single = re.findall(r"loss ([\d.]+)", pool.run_afresh(1, alone, loop)[0])
    both = re.findall(r"loss ([\d.]+)", launched(loop))
    assert (len(single), len(both)) == (1, 2)
    assert both[0] == both[1]
    assert float(both[0]) == pytest.approx(float(single[0]), abs=2e-4)


def incomplete(program: Path) -> str:
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        patch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(zg.CommunicationError) as raised:
            runpy.run_path(str(program), run_name="__main__")
    return str(raised.value)


def test_an_incomplete_launcher_environment_is_an_error(pool: Pool, program: Path) -> None:
    (message,) = pool.run_afresh(1, incomplete, program)
    assert "MASTER_ADDR" in message
    assert "torchrun" in message
