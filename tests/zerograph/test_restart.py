"""The example under torchrun: it goes on from its last checkpoint after a crash, and saves when it is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import zerograph as zg

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
OPTIONS = ["--steps", "12", "--batch", "4", "--save-every", "4"]

# Rank 1 dies behind its 7th step, once.
CRASHING = """
import os, runpy, signal, sys
import zerograph as zg

call = zg.ZeroGraph.__call__

def dying(self, *args, **kwargs):
    found = call(self, *args, **kwargs)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" and self.steps_done == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

zg.ZeroGraph.__call__ = dying
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(folder: Path, *before: str) -> list[str]:
    corpus = folder.parent / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("to be or not to be, that is the question; " * 400)
    example = [str(ROOT / "examples" / "train_gpt.py"), *OPTIONS, "--corpus", str(corpus)]
    return [*before, *example, "--checkpoint", str(folder), "--out", str(folder.parent / "sample.txt")]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_a_job_that_loses_a_rank_restarts_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    whole = command(tmp_path / "whole", *TORCHRUN)
    subprocess.run(whole, check=True, env=environment(), capture_output=True, timeout=240)
    crashed = command(tmp_path / "crashed", *TORCHRUN, "--max-restarts", "2", str(script))
    done = subprocess.run(crashed, check=True, env=environment(), capture_output=True, text=True, timeout=240)
    assert "going on behind step 4" in done.stdout
    expected, found = (zg.read_checkpoint(tmp_path / name) for name in ("whole", "crashed"))
    assert expected["steps_done"] == found["steps_done"] == 12
    for name, value in expected["modules"]["model"].items():
        assert torch.equal(found["modules"]["model"][name], value)


def test_a_job_that_is_told_to_stop_saves_and_ends_well(tmp_path: Path) -> None:
    stopped = [*command(tmp_path / "stopped", *TORCHRUN), "--steps", "100000", "--save-every", "100000"]
    job = subprocess.Popen(stopped, env=environment(), stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step "):
            break
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    rest = job.stdout.read()
    job.wait(60)
    assert "told to stop: saved behind step" in rest
    assert zg.read_checkpoint(tmp_path / "stopped")["steps_done"] >= 1
