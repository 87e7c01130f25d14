"""The GPU benchmark runs from end to end on a CPU, and counts what it should."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulated import kernels, report
from benchmarks.simulated.schedule import Run, Schedule
from benchmarks.simulated.sizes import SIZES, model_flops, peak_flops
from tests.benchmarks import run_script


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script.run("gpu.py") == 2
    assert "There is no GPU here" in capsys.readouterr().err


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {row["contender"]: row for row in map(json.loads, lines) if row["kind"] == "step"}


def measured(folder: Path, *asked: str) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(folder))
        assert not run_script.run("gpu.py", "--device", "cpu", "--tiny", "--steps", "2", "--seconds", "500", *asked)
    return rows(folder)


@pytest.mark.long
def test_alone_all_train_the_same_model(tmp_path: Path) -> None:
    found = measured(tmp_path, "--only", "tiny-llama/*/1")
    ours, *others = (row["losses"] for row in found.values())
    assert len(others) == 3
    # bf16 has eight bits.
    assert all(losses == pytest.approx(ours, rel=2**-8) for losses in others)


@pytest.mark.long
def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(tmp_path, "--only", "tiny/zerograph-3-eager/8", "--traces")["zerograph-3-eager"]
    # Parameters and two moments in fp32, a step count for each, and the batches.
    assert found["rest"] == pytest.approx(12 * found["parameters"] / 8, rel=0.06)
    assert "| zerograph 3, eager | 8 |" in capsys.readouterr().out
    trace = gzip.decompress((tmp_path / "trace-tiny-zerograph-3-eager-8.json.gz").read_bytes())
    assert any("all_gather_into_tensor" in event["name"] for event in json.loads(trace)["traceEvents"])


@pytest.fixture
def schedule(tmp_path: Path) -> Schedule:
    return Schedule("cuda", 2, 80e9, time.monotonic() + 60, tmp_path, say=lambda row: None)


def test_as_many_are_on_the_card_as_it_holds_in_their_order(schedule: Schedule) -> None:
    runs = [Run("first", 40e9), Run("second", 50e9), Run("third", 30e9)]
    assert [run.name for run in schedule._fitting(runs, 80e9)] == ["first", "third"]


def test_what_does_not_get_ready_leaves_a_row(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends at once stands for one that crashes."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    schedule.measure([Run("tiny/zerograph-2-eager/1", 0.0)])
    assert rows(schedule.out)["zerograph-2-eager"]["failed"] == "ended with status 1"


def test_what_no_time_is_left_for_leaves_a_row(schedule: Schedule) -> None:
    schedule.end = time.monotonic()
    schedule.measure([Run("tiny/zerograph-2-eager/1", 0.0)])
    assert rows(schedule.out)["zerograph-2-eager"]["failed"] == "no time was left"


def event(category: str, name: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}


def test_kernels_of_a_step_are_counted_by_class() -> None:
    events = [
        event("kernel", "triton_poi_fused_add_0", 0.0, 1000.0),
        event("kernel", "nvjet_sm90_tst_256x128", 500.0, 1500.0),
        event("kernel", "fmha_cutlassF_bf16_aligned", 3000.0, 1000.0),
        event("kernel", "void multi_tensor_apply_kernel<FusedAdamMathFunctor>", 4000.0, 2000.0),
        event("gpu_memcpy", "Memcpy DtoD", 6000.0, 4000.0),
        event("gpu_user_annotation", "step 0", 0.0, 10000.0),
        event("cuda_runtime", "cudaStreamSynchronize", 0.0, 1.0),
        event("cuda_runtime", "cudaDeviceSynchronize", 0.0, 1.0),
    ]
    found = kernels.summary({"traceEvents": events}, steps=2)
    assert found["kernels"] == 2.5
    assert found["kernels_of"] == dict.fromkeys(kernels.CLASSES[:-1], 0.5) | {"other": 0.0}
    assert found["ms_of"]["optimizer"] == 1.0
    assert found["idle_ms"] == 0.5
    assert found["waits"] == 0.5


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


def test_a_page_weighs_against_compiled_fsdp2_and_names_what_failed() -> None:
    ours = {"contender": "zerograph-2-inductor", "ms": 90.0, "peak": 8e9, "predicted": 8.08e9}
    rival = {"contender": "fsdp2-compiled", "ms": 100.0, "peak": 1e10}
    lost = {"contender": "plain-compiled", "failed": "ValueError: no"}
    common = {"kind": "step", "size": "gpt", "ranks": 1, "fastest_ms": 80.0}
    page = report.page(
        [
            {"kind": "about", "commit": "abc", "date": "2026-11-26", "device": "a card"},
            *({**common, **row} for row in (ours, rival, lost)),
            {"kind": "planned", "size": "gpt", "stage": 2, "ranks": 1, "ms": 99.0},
            {"kind": "test", "name": "test_families.py::test_a_family[mlp]", "outcome": "passed", "deviation": 1e-7},
            {"kind": "test", "name": "test_families.py::test_a_family[t5]", "outcome": "failed", "error": "E  Bad: x"},
        ]
    )
    assert "Commit abc, 2026-11-26, sources not recorded." in page
    assert "| zerograph 2, inductor | 1 | 90.0 | 80.0 |  | 0.900 | 99.0 (1.10) |  | 8.00 | 0.800 | 1.010 |" in page
    assert "within 15% of the measured ones: 1 of 1" in page
    assert "- plain PyTorch, compiled, 1 ranks: ValueError: no" in page
    assert "| families: a family | 1 | 1 | 0 | 1e-07 |" in page
    assert "- test_families.py::test_a_family[t5]: Bad: x" in page
