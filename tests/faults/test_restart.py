"""The example under torchrun: it goes on from its last checkpoint after a crash, and saves when it is told to stop."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerograph as zg
from tests.faults.survival_table import Tally
from tests.pool import Pool
from tests.scripts import run_as_rank, run_by_torchruns_agent, run_script

ROOT = Path(__file__).resolve().parent.parent.parent
# Two at once: each on a port of its own.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPTIONS = ["--steps", "12", "--batch", "4", "--save-every", "4"]
STEPS = 12

# A rank dies once, some seconds behind a step of its own: between steps, or in the middle of one.
CRASHING = """
import os, pathlib, runpy, signal, sys, threading, time
import zerograph as zg

folder, rank, step, delay = sys.argv[1:5]
call = zg.ZeroGraph.__call__
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def note(name, text):
    pathlib.Path(folder, name).write_text(str(text))

def die():
    note("died", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)

def dying(self, *args, **kwargs):
    if not first and not pathlib.Path(folder, "went on").exists():
        note("resumed", self.steps_done)
        note("went on", time.monotonic())
    found = call(self, *args, **kwargs)
    if first and os.environ["RANK"] == rank and self.steps_done == int(step) and self._optimizers:
        threading.Timer(float(delay), die).start() if float(delay) else die()
    return found

zg.ZeroGraph.__call__ = dying
sys.argv = sys.argv[5:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# The sizes of the example, and smaller ones: what is tested does not depend on them.
SIZES = {
    "WIDTH, LAYERS, HEADS, CONTEXT = 128, 4, 4, 128": "WIDTH, LAYERS, HEADS, CONTEXT = 32, 1, 2, 32",
    'PROMPT, SAMPLE_BYTES = "def ", 600': 'PROMPT, SAMPLE_BYTES = "def ", 20',
}


def command(folder: Path, *before: str) -> list[str]:
    corpus, script = folder.parent / "corpus.txt", folder.parent / "train_gpt.py"
    if not corpus.exists():
        corpus.write_text("to be or not to be, that is the question; " * 400)
        text = (ROOT / "examples" / script.name).read_text()
        for size, smaller in SIZES.items():
            assert size in text
            text = text.replace(size, smaller)
        script.write_text(text)
    example = [str(script), *OPTIONS, "--corpus", str(corpus)]
    return [*before, *example, "--checkpoint", str(folder), "--out", str(folder.parent / f"{folder.name} sample.txt")]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run's checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    script, *options = command(folder)
    run_script(pool, 2, Path(script), *options)
    return folder


def crash(folder: Path, rank: int, step: int, delay: float) -> tuple[int, float]:
    """(updates repeated, seconds from the death of a rank until the job goes on) of a run that ends well."""
    script = folder.parent / "crashing.py"
    script.write_text(CRASHING)
    how = [str(script), str(folder.parent), str(rank), str(step), str(delay)]
    run_by_torchruns_agent(folder.parent / "logs", command(folder, *how), restarts=2)
    resumed, died, went_on = (float((folder.parent / name).read_text()) for name in ("resumed", "died", "went on"))
    return step - int(resumed), went_on - died


def _random() -> list[tuple[int, int, float]]:
    draw = random.Random(7)
    return [(rank, draw.randint(1, STEPS - 2), draw.random() * 0.2) for rank in (0, 1, 0, 1, 0, 1)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "step", "delay"),
    [(1, 7, 0.0), *_random()],
)
def test_a_job_that_loses_a_rank_restarts_and_ends_as_if_nothing_had_been(
    tmp_path: Path,
    undisturbed: Path,
    tally: Callable[[str], Tally],
    rank: int,
    step: int,
    delay: float,
) -> None:
    lost_steps, seconds = crash(tmp_path / "crashed", rank, step, delay)
    expected, found = (zg.read_checkpoint(one) for one in (undisturbed, tmp_path / "crashed"))
    assert expected["steps_done"] == found["steps_done"] == STEPS
    for name, value in expected["modules"]["model"].items():
        assert torch.equal(found["modules"]["model"][name], value)
    tally(f"torchrun: rank {rank} is killed at a step").add(True, lost_steps=lost_steps, seconds=seconds)


def stopped_by_sigterm(port: int, script: str, options: tuple[str, ...]) -> tuple[str, list[str]]:
    """Run the script; rank 1 is told to stop after its third update."""
    call = zg.ZeroGraph.__call__

    def counting(self: zg.ZeroGraph, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        if zg.rank() == 1 and self.steps_done == 3 and self._optimizers:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zg.ZeroGraph, "__call__", counting)
        return run_as_rank(port, script, options)


def test_a_job_that_is_told_to_stop_saves_and_ends_well(pool: Pool, tmp_path: Path) -> None:
    script, *options = [*command(tmp_path / "stopped"), "--steps", "100000", "--save-every", "100000"]
    (printed, _), _ = run_script(pool, 2, Path(script), *options, run=stopped_by_sigterm)
    assert "stopped by SIGTERM: saved after step" in printed
    assert 3 <= zg.read_checkpoint(tmp_path / "stopped")["steps_done"] < 100


@pytest.mark.long
def test_torchrun_hands_on_that_the_job_is_to_stop(tmp_path: Path, tally: Callable[[str], Tally]) -> None:
    stopped = [*command(tmp_path / "stopped", *TORCHRUN), "--steps", "100000", "--save-every", "100000"]
    job = subprocess.Popen(stopped, env=environment(), stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step "):
            break
    time.sleep(0.5)
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    rest = job.stdout.read()
    job.wait(240)
    assert "stopped by SIGTERM: saved after step" in rest
    assert zg.read_checkpoint(tmp_path / "stopped")["steps_done"] >= 1
    tally("torchrun: SIGTERM").add(True, lost_steps=0, seconds=time.monotonic() - began)
