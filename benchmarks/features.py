"""Measure what each feature saves: one GPT with every one alone and with all, in benchmarks/results/features.*.

python benchmarks/features.py                  # everything, ten minutes
python benchmarks/features.py bf16 recompute   # these beside "none" only, shown but not written
make bench-memory                              # the first, in the project's own environment

Two ranks over gloo, a pair of processes for each row, one compute thread each, AdamW(fused=True), backend eager; MiB
on rank 0. At rest: parameters and optimizer state between steps. Predicted: `step.inspect.memory`, from the graph
alone. Live: the bytes of all tensors alive at an operator of a running step, at most; the columns after it are what the
prediction consists of. Process: VmHWM over the steps less what the process had before it made the model; glibc gives
freed blocks back (`MALLOC_MMAP_THRESHOLD_`). Step: median of the last half of 20 steps. Deviation: the largest
difference of a loss from that of the same step without features, over these 20 steps. The last table: a model whose
optimizer state alone is more than a limit on the process leaves (RLIMIT_AS), trained plainly and with its state in
files.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import Gpt, Task  # noqa: E402
from benchmarks.measure.process import forget_most_resident, most_resident, resident  # noqa: E402
from benchmarks.tables import Table, asked_names, write  # noqa: E402
from benchmarks.task_steps import eager_step, run_ranks  # noqa: E402
from tests.peak_memory import most_alive_bytes  # noqa: E402
from tests.state.test_out_of_memory import trained_apart  # noqa: E402

STAGES = (1, 2, 3)
STEPS = 20
LAYERS, WIDTH, VOCABULARY, CONTEXT, BATCH = 6, 128, 1024, 64, 8
HEADER = ["feature", "stage", "at rest", "predicted", "live", "process", "step, s", "deviation", "at the peak"]
# A real disk on most machines, where /tmp may be memory.
DISK = "/var/tmp"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def _tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each token follows from the one before, with noise: there is something to learn."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + 7 * torch.arange(CONTEXT + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, tokens.shape, generator=generator)
    tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TASK = Task(lambda: Gpt(LAYERS, WIDTH, 4, VOCABULARY, CONTEXT), _tokens)


Feature = Callable[[zg.Config, str], None]


def _in_files(config: zg.Config, folder: str) -> None:
    config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", folder))


def _all_in_files(config: zg.Config, folder: str) -> None:
    files = zg.OffloadTo("nvme", folder)
    config.memory.offload = zg.Offload(optimizer=files, parameters=files if config.zero.stage == 3 else None)


def _everything(config: zg.Config, folder: str) -> None:
    config.enable_amp(dtype=torch.bfloat16)
    config.gradient_accumulation_steps = 4
    config.memory.activation_checkpointing = "blocks"
    _all_in_files(config, folder)


FEATURES: Mapping[str, Feature] = {
    "none": lambda config, folder: None,
    "bf16": lambda config, folder: config.enable_amp(dtype=torch.bfloat16),
    "fp16": lambda config, folder: config.enable_amp(dtype=torch.float16),
    "accumulation": lambda config, folder: config.set(gradient_accumulation_steps=4),
    "recompute": lambda config, folder: config.set(activation_checkpointing="blocks"),
    "state in files": _in_files,
    "all in files": _all_in_files,
    "everything": _everything,
}


def measure(feature: str, stage: int, folder: str) -> dict[str, Any]:
    """One row, in this process: it is a rank of a job."""
    batches = TASK.batches(zg.rank())
    before = resident()
    step = eager_step(TASK, stage)
    FEATURES[feature](step.config, folder)
    losses, seconds = [], []
    for number in range(STEPS):
        if number == 2:
            forget_most_resident()
        began = time.perf_counter()
        losses.append(float(step(*batches[number % len(batches)])))
        seconds.append(time.perf_counter() - began)
    most = most_resident() - before
    memory = step.inspect.memory
    return {
        "losses": losses,
        "seconds": statistics.median(seconds[STEPS // 2 :]),
        "process": most,
        "rest": step.state_bytes(),
        "predicted": memory.peak,
        "kinds": dict(memory.kinds),
        "live": most_alive_bytes(step, *batches[0]),
    }


def in_own_processes(feature: str, stage: int) -> dict[str, Any]:
    """Return the measurements of rank 0 of a pair of processes."""
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        command = [sys.executable, __file__, "--row", feature, str(stage), folder]
        printed = run_ranks(command, 2, GIVE_BACK)
    row: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return row


def shown(feature: str, stage: int, row: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    deviation = max(abs(one - other) for one, other in zip(row["losses"], plain["losses"], strict=True))
    sizes = [f"{row[name] / 2**20:.1f}" for name in ("rest", "predicted", "live", "process")]
    kinds = ", ".join(f"{kind} {count / 2**20:.1f}" for kind, count in row["kinds"].items() if count > 2**16)
    return [feature, str(stage), *sizes, f"{row['seconds']:.2f}", f"{deviation:.1e}", kinds]


def draw(rows: Mapping[tuple[str, int], Mapping[str, Any]], path: Path) -> None:
    """The peak of each row by kind, a panel for each stage, in the manner of the ZeRO paper's figure 1."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot

    colours = {
        "parameters": "#4c72b0",
        "gathered": "#8da0cb",
        "gradients": "#dd8452",
        "optimizer state": "#55a868",
        "activations": "#c9b458",
        "other": "#bbbbbb",
    }
    stages = sorted({stage for _, stage in rows})
    figure, axes = pyplot.subplots(1, len(stages), figsize=(5.2 * len(stages), 3.4), squeeze=False, sharex=True)
    for axis, stage in zip(axes[0], stages, strict=True):
        here = {feature: row for (feature, at), row in rows.items() if at == stage}
        left = dict.fromkeys(here, 0.0)
        for kind, colour in colours.items():
            widths = [_of_kind(row["kinds"], kind, colours) / 2**20 for row in here.values()]
            axis.barh(list(here), widths, left=list(left.values()), color=colour, label=kind)
            left = {feature: start + more for (feature, start), more in zip(left.items(), widths, strict=True)}
        axis.plot([row["live"] / 2**20 for row in here.values()], list(here), "k|", markersize=11, label="measured")
        axis.invert_yaxis()
        axis.set_title(f"ZeRO stage {stage}", fontsize=10)
        axis.set_xlabel("MiB on a rank at the peak")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def _of_kind(kinds: Mapping[str, float], kind: str, named: Mapping[str, str]) -> float:
    return kinds.get(kind, 0) if kind != "other" else sum(count for name, count in kinds.items() if name not in named)


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        feature, stage, folder = sys.argv[2:]
        files = Path(folder) / f"rank{zg.rank()}"
        files.mkdir()
        print(json.dumps(measure(feature, int(stage), str(files))))
        return
    asked = asked_names(__doc__, "features", FEATURES)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    table = Table(HEADER)
    for feature in FEATURES:
        if asked and feature not in ("none", *asked):
            continue
        for stage in STAGES:
            rows[feature, stage] = in_own_processes(feature, stage)
            table.add(shown(feature, stage, rows[feature, stage], rows["none", stage]))
    limited = within_a_limit()
    if not asked:
        draw(rows, ROOT / "benchmarks" / "results" / "features.png")
        command = f"`make bench-memory` (`python benchmarks/features.py`), torch {torch.__version__}"
        model = f"GPT: {LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY}, {BATCH} x {CONTEXT} tokens on each rank"
        picture = "![MiB on a rank at the peak](features.png)"
        write("What each feature saves", command, __doc__, model, "", *table, "", picture, "", *limited)


def within_a_limit() -> list[str]:
    """A table: plain AdamW, and ours with its state in files, in a process that may not have the state in memory."""
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        found = trained_apart(Path(folder))
    plain = found["plain"] if isinstance(found["plain"], str) else f"losses {found['plain']}"
    rows = [
        ["plain PyTorch", plain.splitlines()[0]],
        ["zerograph, state in files", f"losses {found['ours']}"],
        ["plain PyTorch without a limit", f"losses {found['wanted']}"],
    ]
    header = [f"{found['state'] / 2**20:.0f} MiB of state, {found['left'] / 2**20:.0f} MiB left", "three steps"]
    return Table(header, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
