"""The launcher with OneFlow's options, and the example that it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zerograph.compat.oneflow as flow
from tests.pool import Pool
from tests.scripts import run_script
from zerograph.compat.oneflow.launch import arguments_of_torchrun

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-m", "zerograph.compat.oneflow.launch"]

COMMANDS = {
    "--nproc_per_node 2 train.py --lr 1": "--standalone --nproc-per-node=2 train.py --lr 1",
    "--nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr host -m package.train": (
        "--nnodes=2 --node-rank=1 --master-addr=host --master-port=29500 --nproc-per-node=4 --module package.train"
    ),
    "--master_port 1234 --no_python ./run": (
        "--nnodes=1 --node-rank=0 --master-addr=127.0.0.1 --master-port=1234 --nproc-per-node=1 --no-python ./run"
    ),
    "--nproc-per-node 3 --no-python ./run": "--standalone --nproc-per-node=3 --no-python ./run",
    "--redirect_stdout_and_stderr --logdir logs a.py": (
        "--standalone --nproc-per-node=1 --log-dir=logs --redirects=3 a.py"
    ),
}


@pytest.mark.parametrize(("given", "wanted"), COMMANDS.items())
def test_options_are_torchruns_in_its_words(given: str, wanted: str) -> None:
    assert arguments_of_torchrun(given.split()) == wanted.split()


MISTAKES = {
    "--redirect_stdout_and_stderr a.py": "needs --logdir",
    "-m --no_python a": "exclude each other",
    "--nnodes 2 --node_rank 2 a.py": "give 0 to 1",
    "--nproc_per_node 0 a.py": "from 1 up",
    "--nnodes 0 a.py": "from 1 up",
    "--nproc 2 a.py": "unrecognized arguments|required",
    "": "required",
}


@pytest.mark.parametrize(("given", "message"), MISTAKES.items())
def test_a_mistake_is_named(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of_torchrun(given.split())
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.long
def test_it_starts_as_many_as_it_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # A file for each rank: what two processes print on one pipe may mix.
    script.write_text(
        "import os, pathlib, sys\nrank, size = os.environ['RANK'], os.environ['WORLD_SIZE']\n"
        "pathlib.Path(__file__).with_name(rank).write_text(' '.join([rank, 'of', size, *sys.argv[1:]]))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [*LAUNCH, "--nproc_per_node", "2", str(script), "--lr", "1"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if path != script}
    assert written == {"0": "0 of 2 --lr 1", "1": "1 of 2 --lr 1"}


def switches_off() -> None:
    """They are of the whole process, which other tests share."""
    flow.boxing.nccl.enable_use_compute_stream(False)
    flow.boxing.nccl.disable_group_boxing_by_dst_parallel(False)


def test_the_example_trains_and_predicts_over_two_processes(pool: Pool) -> None:
    options = ["--stage", "3", "--steps", "30"]
    try:
        (printed, warned), _ = run_script(pool, 2, ROOT / "examples" / "oneflow_zero.py", *options)
    finally:
        pool.run(2, switches_off)
    assert not warned
    assert "ZeRO stage 3, 30 steps done" in printed
    assert "weight before (B,), after (S(0),), in the file torch.Size([128, 256])" in printed
    found = re.search(r"loss ([\d.]+) to ([\d.]+)", printed)
    assert found
    assert float(found[2]) < 0.8 * float(found[1])
