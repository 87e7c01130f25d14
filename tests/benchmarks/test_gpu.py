"""The GPU benchmark runs from end to end on a CPU, and counts what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulated import report
from benchmarks.simulated.sizes import SIZES, model_flops, peak_flops
from tests.benchmarks import run_script


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script.run("gpu.py") == 2
    assert "There is no GPU here" in capsys.readouterr().err


def measured(folder: Path, contenders: list[str], *asked: str) -> list[dict[str, Any]]:
    options = ["--device", "cpu", "--tiny", "--steps", "2", "--out", str(folder / "run")]
    for one in contenders:
        options += ["--contenders", one]
    assert not run_script.run("gpu.py", *options, *asked)
    found: list[dict[str, Any]] = json.loads((folder / "run.json").read_text())["measurements"]
    return found


@pytest.mark.long
def test_alone_both_train_the_same_model(tmp_path: Path) -> None:
    ours, theirs = measured(tmp_path, ["zerograph-3-eager", "fsdp2-eager"], "--ranks", "1")
    # bf16 has eight bits.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2**-8)


@pytest.mark.parametrize(
    ("contender", "called", "gather"),
    [
        ("zerograph-3-eager", "zerograph 3, eager", "all_gather_into_tensor"),
        pytest.param("fsdp2-eager", "FSDP2", "FSDP::all_gather", marks=pytest.mark.long),
    ],
)
def test_it_runs_on_a_cpu(tmp_path: Path, contender: str, called: str, gather: str) -> None:
    (found,) = measured(tmp_path, [contender], "--ranks", "8", "--trace", str(tmp_path))
    # Parameters and two moments in fp32, a step count for each, and the batches.
    assert found["rest"] == pytest.approx(12 * found["parameters"] / 8, rel=0.06)
    assert called in (tmp_path / "run.md").read_text()
    events = json.loads((tmp_path / f"{contender}-of-8.json").read_text())["traceEvents"]
    assert any(gather in event["name"] for event in events)


def test_model_flops_of_the_tiny_gpt() -> None:
    size = SIZES["tiny"]
    # qkv, out, up and down with their biases, two norms; the last norm and the head.
    block = 32 * 96 + 96 + 32 * 32 + 32 + 32 * 128 + 128 + 128 * 32 + 32 + 4 * 32
    weights = 2 * block + 2 * 32 + 64 * 32
    attention = 12 * 2 * 32 * 16
    assert model_flops(size, size.task().model()) == 2 * 16 * (6 * weights + attention)


def test_peak_flops_go_by_the_device_s_name() -> None:
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("CPU") is None


def test_the_better_of_our_backends_is_weighed_against_compiled_fsdp2() -> None:
    common = {"ranks": 8, "rest": 0, "predicted": None, "first_step": 1.0, "model_flops": 1, "device_flops": None}
    measured = {
        "zerograph-3-eager": {"seconds": [2.0], "peak": 80},
        "zerograph-3-inductor": {"seconds": [1.0], "peak": 95},
        "fsdp2-compiled": {"seconds": [1.25], "peak": 80},
    }
    measurements = [{"contender": name, "losses": [], **common, **one} for name, one in measured.items()]
    page = report.page({"about": {}, "ranks": [8], "peak_tflops": None, "measurements": measurements})
    assert "stage 3: time 0.800 (met), peak memory 1.000 (**missed**)" in page
