"""Held-out loss, bytes and update times with coded wires and coded optimizer state; written to results/thin.md.

python benchmarks/thin.py                                # GPT small, 300 steps, two ranks: about 8 minutes
python benchmarks/thin.py --run mid 1000 2 --run tiny 300 3       # GPT mid on two ranks, tiny on three: an hour
python benchmarks/thin.py --keep rows.json               # go on after an interrupt: reads finished rows
python benchmarks/thin.py --only exact "int8 state"      # these codes, beside exact ones

The ranks train a GPT on bytes of Python's standard library by AdamW at ZeRO stage 2, from the same parameters and with
the same batches, each time with other codes. The learning rate rises in the first tenth of the steps and then falls to
zero, so that differences in rounding alone hardly change the end. Exact training from weights that are a millionth
larger shows how far they do: smaller differences between rows say nothing.

Told: the mean loss over the same windows of held-out files after the last step, by the exact masters, and how far it is
from that of exact wires and state; the bytes that rank 0 sends for parameters and gradients in a step, as predicted and
as a fraction of exact ones, and the bytes that it really received per step, losses included; optimizer state per
parameter. The last table is the update of one flat tensor by AdamW with `fused=True`, with fp32 state and with state in
eight bits, there by a compiled kernel and by operators one by one: CPU time of one thread, in turn, medians of 15
rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import Gpt  # noqa: E402
from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402
from tests.pool import Pool  # noqa: E402
from zerograph.optim import trace_update  # noqa: E402
from zerograph.optim.coded import with_coded_state  # noqa: E402
from zerograph.passes.buckets.coded_updates import CodedUpdate  # noqa: E402
from zerograph.passes.context import BucketUpdate  # noqa: E402
from zerograph.runtime.backends.coded_kernels import compile_update  # noqa: E402
from zerograph.runtime.peer_memory import cross_memory  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "thin.md"
# How far a run is from another that differs in rounding only: the scale for all other rows.
PERTURBED = "exact, from weights 1e-6 off"
CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    PERTURBED: {"perturbation": 1e-6},
    "bf16 wire": {"wire": "bf16"},
    "int8 wire": {"wire": "int8"},
    "int8 gather, int4 reduce": {"wire": {"gather": "int8", "reduce": "int4"}},
    "int8 gather, int4 reduce, feedback": {"wire": {"gather": "int8", "reduce": zg.wire("int4", feedback=True)}},
    "int4 wire, feedback": {"wire": zg.wire("int4", feedback=True)},
    "int8 state": {"optimizer_state": "int8"},
    "int8 wire and state": {"wire": "int8", "optimizer_state": "int8"},
}
# Layers, width, heads, length of a window, windows per rank.
SIZES = {"tiny": (1, 32, 2, 32, 2), "small": (4, 256, 4, 128, 4), "mid": (8, 512, 8, 128, 2)}
CORPUS_BYTES = 4_000_000
HELD_OUT_BATCHES, ROUNDS = 16, 15
HEADER = [
    "codes",
    "held-out loss",
    "from exact",
    "sent, predicted",
    "of exact",
    "received per step",
    "state per parameter",
]
UPDATE_HEADER = ["elements", "fp32 state, ms", "state in eight bits, ms", "ratio", "operators one by one, ms", "ratio"]


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out bytes, of other files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    files = sorted(file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts))
    random.Random(0).shuffle(files)
    sizes = itertools.accumulate(file.stat().st_size for file in files)
    texts = [file.read_bytes() for file, size in zip(files, sizes, strict=True) if size <= CORPUS_BYTES]
    last = len(texts) // 20
    parts = (b"".join(texts[:-last]), b"".join(texts[-last:]))
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch of windows, and the byte after each of theirs."""
    own = starts.chunk(zg.world_size())[zg.rank()]
    found = text[own[:, None] + torch.arange(length + 1)].long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Train(zg.ZeroGraph):
    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        self.add_optimizer(self.optimizer)
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss


class Evaluate(zg.ZeroGraph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())


def train(size: str, steps: int, lr: float, options: dict[str, Any]) -> tuple[float, int, float, float]:
    """Return held-out loss, predicted and received bytes per step, and bytes of state per parameter, on every rank."""
    layers, width, heads, length, batch = SIZES[size]
    torch.manual_seed(0)
    model = Gpt(layers, width, heads, 256, length)
    for parameter in model.parameters():
        parameter.data *= 1 + options.get("perturbation", 0.0)
    step, evaluate = Train(model, lr), Evaluate(model)
    step.config.set(**{name: value for name, value in options.items() if name != "perturbation"})
    text, held_out = corpus()
    generator = torch.Generator().manual_seed(1)
    numel = sum(parameter.numel() for parameter in model.parameters())
    received = 0
    for number in range(steps):
        step.optimizer.param_groups[0]["lr"] = lr * min(1, 10 * (number + 1) / steps) * (1 - number / steps)
        starts = torch.randint(len(text) - length - 1, (batch * zg.world_size(),), generator=generator)
        before = cross_memory.bytes_read()
        step(*windows(text, starts, length))
        received = cross_memory.bytes_read() - before
    predicted = sum(one.bytes for one in step.inspect.collectives() if "bucket" in one.what)
    stores = step._stores()
    state = sum(value.nbytes for store in stores for value in store.state.values() if isinstance(value, Tensor))
    count = HELD_OUT_BATCHES * batch * zg.world_size()
    starts = torch.linspace(0, len(held_out) - length - 1, count).long()
    losses = [float(evaluate(*windows(held_out, some, length))) for some in starts.split(batch * zg.world_size())]
    return statistics.fmean(losses), predicted, received, state * zg.world_size() / numel


def coded_update(numel: int, *, compiled: bool) -> Callable[[], Any]:
    """The update of a shard as a step with coded state makes it, with a C++ compiler or without one."""
    parameter = nn.Parameter(torch.zeros(numel))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    traced = trace_update(optimizer, optimizer.param_groups[0], parameter.shape, torch.float32, "cpu")
    program = with_coded_state(traced, "weight")
    numbers = {name: name for name in program.numbers}
    module = CodedUpdate(BucketUpdate((program,), False, numbers, {}, {}, {}, "optimizer0"), guarded=False)
    module.compiled = compile_update(module) if compiled else None
    state = [
        torch.ones((), dtype=spec.dtype)
        if spec.codec is None
        else torch.zeros(spec.codec.coded_bytes(numel), dtype=torch.uint8)
        for spec in program.state.values()
    ]
    gradient, lr = torch.randn(numel), torch.tensor(1e-3, dtype=torch.float64)
    return lambda: module(parameter.detach(), gradient, lr, *state)


def fused_update(numel: int) -> Callable[[], Any]:
    parameter = nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.randn(numel)
    return torch.optim.AdamW([parameter], fused=True).step


@torch.no_grad()
def update_row(numel: int) -> list[str]:
    updates = [fused_update(numel), *(coded_update(numel, compiled=compiled) for compiled in (True, False))]
    exact, *coded = medians(updates, ROUNDS, warm_up=3, clock=time.thread_time)
    row = [f"{numel:,}", f"{exact * 1e3:.2f}"]
    return row + [text for one in coded for text in (f"{one * 1e3:.2f}", f"{one / exact:.2f}")]


def rows(size: str, steps: int, ranks: int, lr: float, codes: list[str], keep: Path | None) -> list[str]:
    """Train with each of these codes; return the lines of a table, printed as they come.

    Args:
        keep: a JSON file of finished rows, read and extended.
    """
    kept = json.loads(keep.read_text()) if keep and keep.exists() else {}
    lines = [f"## GPT {size}, {steps:,} steps, {ranks} ranks", "", line(HEADER)]
    lines.append(line(["---", *["---:"] * (len(HEADER) - 1)]))
    print("\n".join(lines), flush=True)
    pool = Pool(size=ranks, patience=3600.0)
    exact: tuple[float, int, float, float] | None = None
    for name in [name for name in CASES if name in {"exact", *codes}]:
        run = size, steps, lr, CASES[name]
        key = repr((ranks, name, *run))
        if key not in kept:
            kept[key] = pool.run(ranks, train, *run)[0]
            if keep:
                keep.write_text(json.dumps(kept, indent=1))
        loss, predicted, received, state = kept[key]
        exact = exact or (loss, predicted, received, state)
        change = f"{100 * (loss / exact[0] - 1):+.2f} %"
        sent = [f"{predicted:,}", f"{predicted / exact[1]:.3f}", f"{received:,}"]
        lines.append(line([name, f"{loss:.4f}", change, *sent, f"{state:.2f}"]))
        print(lines[-1], flush=True)
    pool.close()
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", nargs=3, action="append", metavar=("SIZE", "STEPS", "RANKS"), help=f"SIZE: {', '.join(SIZES)}"
    )
    parser.add_argument("--lr", type=float, default=3e-4, help="the highest learning rate")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path, help="a JSON file of finished rows")
    asked = parser.parse_args()
    runs = [(size, int(steps), int(ranks)) for size, steps, ranks in asked.run or [("small", "300", "2")]]
    if unknown := {size for size, *_ in runs} - set(SIZES):
        parser.error(f"no size {', '.join(sorted(unknown))}: choose from {', '.join(SIZES)}")
    lines = [text for run in runs for text in rows(*run, asked.lr, asked.only, asked.keep)]
    torch.set_num_threads(1)
    updates = [line(UPDATE_HEADER), line(["---:"] * len(UPDATE_HEADER)), *(line(update_row(n)) for n in (2**18, 2**22))]
    print("\n".join(updates))
    options = " ".join(f"--run {size} {steps} {ranks}" for size, steps, ranks in runs)
    command = f"`python benchmarks/thin.py {options}` (torch {torch.__version__})"
    RESULTS.write_text(page("Coded wires and optimizer state", command, __doc__, *lines, "## The update", "", *updates))


if __name__ == "__main__":
    main()
