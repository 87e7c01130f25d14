"""Seconds and bytes of steps on a device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import tensors

NextStep = Callable[[], object]


def seconds(device: str, step: NextStep, steps: int) -> list[float]:
    """Time each of several steps in a row: on CUDA as the device sees them, which the host may run ahead of."""
    if device == "cpu":
        return [_seconds(step) for _ in range(steps)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def _seconds(step: NextStep) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def host_seconds(device: str, step: NextStep, steps: int) -> float:
    """Time until the host is free again, of each of some steps: what launching takes, where nothing waits."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def memory(device: str, step: NextStep, steps: int) -> tuple[int, int]:
    """Bytes of tensors between steps, and the most within some of them, as torch's allocator counts them."""
    if device == "cpu":
        rest = tensors.alive()
        return rest, rest + tensors.most_allocated(step)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return rest, torch.cuda.max_memory_allocated()


def trace(device: str, step: NextStep, steps: int, file: Path, *, whole: bool) -> None:
    """Write steps as a chrome trace, for chrome://tracing or ui.perfetto.dev.

    Args:
        whole: the operators, too; without them it has kernels and calls of CUDA.
    """
    on_host = [ProfilerActivity.CPU] if whole or device == "cpu" else []
    with profile(activities=[*on_host, *([ProfilerActivity.CUDA] if device == "cuda" else [])]) as seen:
        for number in range(steps):
            with record_function(f"step {number}"):
                step()
        if device == "cuda":
            torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(file))


def ceilings() -> dict[str, float]:
    """Measure what a product in bf16 and a copy reach, in 1e12 operations and 1e12 bytes a second."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product = sorted(seconds("cuda", lambda: left @ right, 20))[10]
    copy = sorted(seconds("cuda", lambda: target.copy_(source), 10))[5]
    return {"tflops": 2 * 8192**3 / product / 1e12, "copy_tb": 2 * 2**31 / copy / 1e12}


def name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"
