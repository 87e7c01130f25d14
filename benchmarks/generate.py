"""Tokens per second of ``step.generate()`` between steps; written to results/generate.md.

python benchmarks/generate.py        # a minute or two

A Llama of random weights in fp32, sharded over two ranks of one machine, gloo; one row of 16 tokens on each rank,
greedy. Every way runs transformers' own loop with a dynamic cache, in turn, in the same processes; medians of 3 rounds,
rank 0's time. "Gathered once" and "in units" are step.generate() without and with a memory budget that does not hold
the model. "Gathered for each token" gathers all buckets before each forward and frees them after it, as a loop over
step.full_parameters() does. "Plain" is model.generate() on a whole model. The time for a token includes that of the
gathers. The ratio is one of wire to compute: here a gather goes through the memory of one host, and the two cores that
compute also move its bytes.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402
from tests.pool import Pool  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "generate.md"
HEADER = ["new tokens", "way", "ms per token", "gathered once is faster by"]
WAYS = ("plain", "gathered once", "in units", "gathered for each token")
ROUNDS, LENGTHS = 3, (32,)


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, vocab_size=2048
    )
    return transformers.LlamaForCausalLM(config).eval()


class Forward(zg.ZeroGraph):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids).logits
        return logits


@contextlib.contextmanager
def gathered_for_each_forward(step: Forward) -> Any:
    """Enter ``full_parameters()`` before each forward of the model, and leave it afterwards."""
    stack = contextlib.ExitStack()
    hooks = [
        step.model.register_forward_pre_hook(lambda *_: stack.enter_context(step.full_parameters())),
        step.model.register_forward_hook(lambda *_: stack.close()),
    ]
    yield
    for hook in hooks:
        hook.remove()


def measured(new: int) -> list[float]:
    """Return the milliseconds of each way for a token."""
    plain = llama()
    with zg.sharded_init():
        model = llama()
    step = Forward(model)
    ids = torch.arange(16).view(1, 16) + zg.rank()
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}

    def generate(budget: int | None) -> Any:
        step.config.memory_budget = budget
        return step.generate(model, ids, **options)

    def for_each_token() -> Any:
        with gathered_for_each_forward(step):
            return model.generate(ids, **options)

    runs: list[Callable[[], Any]] = [
        lambda: plain.generate(ids, **options),
        lambda: generate(None),
        lambda: generate(1),
        for_each_token,
    ]
    seconds: list[list[float]] = [[] for _ in runs]
    tokens = [run() for run in runs]
    assert all(torch.equal(other, tokens[0]) for other in tokens)
    for _ in range(ROUNDS):
        for run, taken in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) / new * 1e3 for taken in seconds]


def main() -> None:
    size = sum(parameter.nbytes for parameter in llama().parameters())
    lines = [f"{size / 1e6:.0f} MB of parameters.", "", line(HEADER), line(["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    pool = Pool(size=2)
    for new in LENGTHS:
        times = pool.run(2, measured, new)[0]
        for way, value in zip(WAYS, times, strict=True):
            lines.append(line([str(new), way, f"{value:.1f}", f"{value / times[1]:.1f}"]))
            print(lines[-1], flush=True)
    pool.close()
    command = f"`python benchmarks/generate.py`, torch {torch.__version__}, transformers {transformers.__version__}"
    RESULTS.write_text(page("Generating between steps", command, __doc__, *lines))


if __name__ == "__main__":
    main()
