"""Seconds from build() to the graph that a backend gets, part by part: capture, the optimizer's update, every pass.

python benchmarks/compile_time.py                                      # everything, saved to results/compile_time.md
python benchmarks/compile_time.py --only "GPT, 12 layers" --ranks 2    # one model for one number of ranks, printed

Stage 3 with AdamW. Models live on the meta device: nothing has memory for a weight. No process group is made either, so
any number of ranks can be asked for; what is measured is the work of one of them. Every line is a process of its own,
so that none profits from what another has worked out before. `total` and the parts are seconds on the clock, `CPU` is
the process's own; `memory` is by how much the process grew while it prepared the step. Steps for "any size" have
symbolic rows and lengths (`config.dynamic_shapes = True`); the others are static.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import Gpt  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from zerograph.ir.mesh import line  # noqa: E402


class GptStep(zg.ZeroGraph):
    def __init__(self, model: nn.Module, fused: bool = False) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused))
        self.config.zero.stage = 3

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss


class LlamaStep(GptStep):
    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, labels=y, use_cache=False).loss
        loss.backward()
        return loss


def gpt(layers: int, *, any_size: bool = False) -> tuple[GptStep, Tensor]:
    step = GptStep(Gpt(layers, 512, 8, 16384, 256))
    step.config.dynamic_shapes = any_size
    return step, torch.zeros(2, 256, dtype=torch.int64)


def llama(fused: bool = False) -> tuple[GptStep, Tensor]:
    """Llama-3-8B as Meta published it."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds to import: only for those who use it

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    return LlamaStep(LlamaForCausalLM(config), fused), torch.zeros(1, 8192, dtype=torch.int64)


MODELS: dict[str, tuple[Callable[[], tuple[GptStep, Tensor]], tuple[int, ...]]] = {
    "GPT, 6 layers": (lambda: gpt(6), (2,)),
    "GPT, 12 layers": (lambda: gpt(12), (2,)),
    "GPT, 24 layers": (lambda: gpt(24), (2,)),
    "GPT, 48 layers": (lambda: gpt(48), (2, 64, 1024)),
    "GPT, 12 layers, any size": (lambda: gpt(12, any_size=True), (2,)),
    "GPT, 48 layers, any size": (lambda: gpt(48, any_size=True), (2,)),
    "Llama-3-8B": (llama, (2, 64, 1024)),
}


@dataclass(frozen=True)
class Measured:
    """One model for one number of ranks; ``seconds`` by part, ``memory`` the bytes that the process grew by."""

    model: str
    ranks: int
    parameters: int
    seconds: dict[str, float]
    cpu: float
    nodes: int
    memory: int


def measure(model: str, ranks: int) -> Measured:
    torch.set_num_threads(1)
    with torch.device("meta"):
        step, tokens = MODELS[model][0]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    prepared = step.prepare(line(ranks, 0, "ranks"), tokens, tokens)
    cpu = time.process_time() - cpu
    seconds = {record.name: record.seconds for record in prepared.passes}
    seconds = {"capture": seconds.pop("capture"), "update": prepared.update_seconds, **seconds}
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    parameters = sum(p.numel() for p in step.model.parameters())
    return Measured(model, ranks, parameters, seconds, cpu, prepared.passes[-1].nodes, memory)


def in_a_process(model: str, ranks: int) -> Measured:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (model, ranks))


def rows(found: list[Measured]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table."""
    parts = list(found[0].seconds)
    lines = []
    for one in found:
        seconds = [one.seconds[part] for part in parts]
        shown = [f"{value:.2f}" for value in (*seconds, sum(seconds), one.cpu)]
        sizes = f"{one.parameters / 1e6:,.0f} M", f"{one.memory / 2**20:,.0f} MiB"
        lines.append([one.model, str(one.ranks), sizes[0], *shown, str(one.nodes), sizes[1]])
    return ["model", "ranks", "parameters", *parts, "total", "CPU", "nodes", "memory"], lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    wanted = [
        (model, ranks)
        for model, (_, counts) in MODELS.items()
        for ranks in ((options.ranks,) if options.ranks else counts)
        if options.only in (None, model)
    ]
    table = Table(*rows([in_a_process(*one) for one in wanted]))
    if options.only is None and options.ranks is None:
        machine = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {date.today()}"
        command = f"`python benchmarks/compile_time.py`, {machine}"
        write("Seconds before the backend", command, __doc__, *table)


if __name__ == "__main__":
    main()
