"""The README's program, as its reader would run it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import zerograph as zg
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.executable)
SINGLE = [str(PYTHON)]
TWO = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program of the README's section on the training step, in a file."""
    section = (ROOT / "README.md").read_text().split("## A training step")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    file = tmp_path / "train.py"
    file.write_text(found.group(1))
    return file


def run(command: list[str], program: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [*command, str(program)], cwd=program.parent, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_readme_runs_with_and_without_a_launcher(program: Path) -> None:
    alone, together = run(SINGLE, program), run(TWO, program)
    for result in (alone, together):
        assert result.returncode == 0, result.stderr
        # torch complains about a process group that nobody destroyed, and so on.
        assert "Warning" not in result.stderr
        assert "destroy_process_group" not in result.stderr
    assert "rank 0 of 1" in alone.stdout
    assert "rank 0 of 2" in together.stdout
    losses = [float(result.stdout.split()[1]) for result in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


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
    (message,) = pool.run(1, incomplete, program)
    assert "MASTER_ADDR" in message
    assert "torchrun" in message
