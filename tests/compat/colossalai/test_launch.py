"""Scripts start as ColossalAI's do, under torchrun or by their own numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import zerograph as zg
from tests.pool import Pool
from tests.scripts import run_script
from zerograph.compat import colossalai

ROOT = Path(__file__).parents[3]


def test_the_example_trains_over_two_processes(pool: Pool, tmp_path: Path) -> None:
    options = ["--offload", "nvme", "--nvme-path", str(tmp_path), "--epochs", "3"]
    (printed, warned), _ = run_script(pool, 2, ROOT / "examples" / "colossalai_zero.py", *options)
    assert not warned
    right = [float(one) for one in re.findall(r"([\d.]+)% right", printed)]
    assert right[-1] > 80
    assert "stage 3" in printed


def launched(folder: str) -> tuple[int, str]:
    file = Path(folder) / f"config{zg.rank()}.py"
    file.write_text("optimizer = dict(type='SGD', lr=0.1)\nzero = dict(level=1)\nfp16 = False\n")
    colossalai.launch(str(file), zg.rank(), 2, "127.0.0.1", 29500, seed=5, verbose=False)
    engine, *_ = colossalai.initialize(torch.nn.Linear(7, 3), verbose=False)
    with pytest.raises(zg.CommunicationError, match="already"):
        colossalai.launch(str(file), 3, 4, "127.0.0.1", 29500, verbose=False)
    return torch.initial_seed(), f"{type(engine.optimizer).__name__}, {engine.graph.config.policy.name}"


def test_launch_sets_the_seed_and_the_configuration_of_initialize(pool: Pool, tmp_path: Path) -> None:
    for seed, shown in pool.run(2, launched, str(tmp_path)):
        assert seed == 5
        assert shown == "SGD, stage 1"


def test_outside_torchrun_launch_from_torch_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(zg.CommunicationError, match="torchrun"):
        colossalai.launch_from_torch({}, verbose=False)


def test_a_configuration_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerograph.compat.colossalai.launching._latest", None)
    with pytest.raises(zg.ConfigError, match="no configuration"):
        colossalai.initialize(torch.nn.Linear(7, 3))
