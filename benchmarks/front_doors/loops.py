"""A step of a plain loop through ``zg.prepare`` beside the step of a ``ZeroGraph`` that does the same."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from benchmarks.contenders.tasks import Gpt
from benchmarks.measure.job import seconds
from tests.pool import Pool

ROWS, LENGTH, VOCABULARY = 8, 96, 1024
HEADER = ["model", "stage", "loop", "build(), ms", "zg.prepare, ms", "ratio"]
CASES = [(model, stage, loop) for model in ("GPT", "perceptron") for stage in (2, 3) for loop in ("plain", "clip")]
CASES += [("GPT", 2, "early"), ("GPT", 3, "early")]


def compare(ranks: int, rounds: int) -> list[list[str]]:
    """Return a row of cells for each case."""
    pool = Pool(hash_apart=False, patience=1200.0)
    try:
        times = pool.run(ranks, _on_rank, rounds)[0]
    finally:
        pool.close()
    return [
        [name, str(stage), loop, f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{ratio:.3f}"]
        for (name, stage, loop), (first, second, ratio) in zip(CASES, times, strict=True)
    ]


def gpt() -> nn.Module:
    """Return a GPT of 6 layers and width 128."""
    torch.manual_seed(0)
    return Gpt(6, 128, 4, VOCABULARY, LENGTH)


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, -2), y.flatten())


class Native(zg.ZeroGraph):
    """The step that the others are compared with."""

    def __init__(self, module: nn.Module, stage: int, clips: bool) -> None:
        super().__init__()
        self.model, self.clips = module, clips
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.config.zero.stage = stage
        self.config.backend = "eager"

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the loss and its gradients; clip these."""
        loss = loss_of(self.model, x, y)
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return gpt() if name == "GPT" else nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))


def _batch(name: str) -> tuple[Tensor, Tensor]:
    if name == "GPT":
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        return tokens, tokens
    return torch.randn(ROWS, 16), torch.randint(0, 4, (ROWS,))


def _prepared(name: str, stage: int, loop: str) -> Callable[[Tensor, Tensor], Tensor]:
    config = zg.Config()
    config.backend = "eager"
    module = _model(name)
    module, optimizer = zg.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3), stage=stage, config=config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        if loop == "early":
            loss.item()
        loss.backward()
        if loop == "clip":
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _measured(case: tuple[str, int, str], rounds: int) -> tuple[float, float, float]:
    """Return the median seconds of either step, and the median ratio."""
    name, stage, loop = case
    x, y = _batch(name)
    native, script = Native(_model(name), stage, loop == "clip"), _prepared(name, stage, loop)
    pairs = []
    for number in range(rounds + 5):
        pair = seconds(lambda: native(x, y)), seconds(lambda: script(x, y))
        if number >= 5:
            pairs.append(pair)
    ratios = [second / first for first, second in pairs]
    return *(statistics.median(times) for times in zip(*pairs, strict=True)), statistics.median(ratios)


def _on_rank(rounds: int) -> list[tuple[float, float, float]]:
    warnings.simplefilter("ignore")
    return [_measured(case, rounds if case[0] == "GPT" else rounds * 5) for case in CASES]
