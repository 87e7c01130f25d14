"""A run as a page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.simulated.contenders import CONTENDERS, RIVALS
from benchmarks.tables import line

GOAL = 0.9

NOTES = """\
One process is rank 0 of a job; the other ranks are simulated: the process group is torch's fake one, whose collectives
copy the rank's own data on the device and send nothing. Memory and compute are those of a real rank, the wire is not,
and with more than one rank the numbers that are trained on are not those of a real job; so losses are compared for
one rank only. With `--trace` the copies run on a CUDA stream of their own, as NCCL's kernels do, and the steps measured
are those of that group; a copy on the device is faster than a wire, so a trace shows which compute lies between a
collective's start and the wait for it, not how long a wire would take.

Zerograph: fp32 parameters, `torch.autocast` in bf16 around forward and loss in `build()`. So its gathers move fp32,
the residual stream is kept as autocast keeps it, and each use of a weight is cast. FSDP2: fp32 parameters,
`MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`, loss in fp32; its gathers move bf16. Both: fused
AdamW; FSDP2 compiled block by block. FSDP2 has no stage 1: there its stage 2 (no reshard) is the rival.

**step**: median milliseconds of a step, with quartiles. **MFU**: model flops (6 for each token and each weight that
is multiplied, 12 * layers * width * context for each token in attention) over what the device's maker promises dense
in bf16. **peak**: the most that torch's allocator had given out within a step (`torch.cuda.max_memory_allocated`; on
CPU by the profiler), **at rest**: between steps, **predicted**: `step.memory.peak`, all in MB of 10^6 bytes.
**/ rival**: over compiled FSDP2 of the stage; the goal is 0.9 at most for time and memory both.
**first step**: seconds from the model on the device to the end of the first step."""

HEAD = (
    *("contender", "step", "quartiles", "/ rival", "MFU", "peak", "/ rival", "at rest", "predicted"),
    *("first step", "losses"),
)

Measurement = Mapping[str, Any]


def page(run: Mapping[str, Any]) -> str:
    """The whole page of a run: ``about`` (what and where), ``ranks``, ``peak_tflops``, ``measurements``."""
    facts = "\n".join(f"- {name}: {value}" for name, value in run["about"].items())
    parts = ["# On one device, alone and as rank 0 of simulated ranks", "Written by `python benchmarks/gpu.py`.", facts]
    for ranks in run["ranks"]:
        found = {one["contender"]: one for one in run["measurements"] if one["ranks"] == ranks}
        title = "Alone" if ranks == 1 else f"Rank 0 of {ranks} simulated ranks"
        parts += [f"## {title}", _table(found, ranks, run["peak_tflops"]), *_goals(found), *_problems(found)]
    return "\n\n".join([*parts, "## What it means", NOTES, ""])


def _table(found: Mapping[str, Measurement], ranks: int, peak_tflops: float | None) -> str:
    rows = [_cells(one, found, ranks, peak_tflops) for one in found.values() if "seconds" in one]
    return "\n".join([line(HEAD), line(["---", *["---:"] * (len(HEAD) - 2), "---"]), *map(line, rows)])


def _cells(one: Measurement, found: Mapping[str, Measurement], ranks: int, peak_tflops: float | None) -> Sequence[str]:
    contender = CONTENDERS[one["contender"]]
    rival = found.get(RIVALS[contender.stage], {})
    step = statistics.median(one["seconds"])
    promised = peak_tflops * 1e12 if peak_tflops else one["device_flops"]
    return (
        contender.title,
        f"{step * 1000:.1f}",
        _quartiles(one["seconds"]),
        f"{step / statistics.median(rival['seconds']):.3f}" if "seconds" in rival else "",
        f"{100 * one['model_flops'] / step / promised:.1f} %" if promised else "",
        _megabytes(one["peak"]),
        f"{one['peak'] / rival['peak']:.3f}" if "peak" in rival else "",
        _megabytes(one["rest"]),
        _megabytes(one["predicted"]),
        f"{one['first_step']:.1f}",
        " ".join(f"{loss:.3f}" for loss in one["losses"]) if ranks == 1 else "",
    )


def _goals(found: Mapping[str, Measurement]) -> list[str]:
    """The better of our backends over the rival, stage by stage, where both were measured."""
    lines = []
    for stage, name in RIVALS.items():
        rival = found.get(name, {})
        ours = [one for one in found.values() if (who := CONTENDERS[one["contender"]]).ours and who.stage == stage]
        ours = [one for one in ours if "seconds" in one]
        if ours and "seconds" in rival:
            times = [statistics.median(one["seconds"]) for one in ours]
            fast = min(times) / statistics.median(rival["seconds"])
            lean = min(one["peak"] for one in ours) / rival["peak"]
            lines.append(f"- stage {stage}: time {_verdict(fast)}, peak memory {_verdict(lean)}")
    return ["\n".join([f"Goals, at most {GOAL} of compiled FSDP2:", "", *lines])] if lines else []


def _verdict(ratio: float) -> str:
    return f"{ratio:.3f} ({'met' if ratio <= GOAL else '**missed**'})"


def _problems(found: Mapping[str, Measurement]) -> list[str]:
    lines = [f"- {CONTENDERS[name].title}: failed: {one['failed']}" for name, one in found.items() if "failed" in one]
    return ["\n".join(lines)] if lines else []


def _quartiles(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return ""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{low * 1000:.1f} to {high * 1000:.1f}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"
