"""``step.inspect.memory`` predicts from the graph alone what a running step holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares, sliced
from tests.models import Gpt, part
from tests.peak_memory import most_alive_bytes
from tests.pool import Pool

SAMPLES = 8


def _gpt(layers: int, width: int, vocabulary: int, context: int) -> tuple[Callable[[], nn.Module], Any]:
    def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(vocabulary, (SAMPLES, context + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return lambda: Gpt(False, vocabulary, width, layers, context), tokens


class Splits(nn.Module):
    """Backward keeps one part of a split, and so the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        kept, shift, more = self.project(x).split(32, dim=2)
        return kept.sin() + shift + more


class Deep(LossStep):
    def __init__(self) -> None:
        model = nn.Sequential(Splits(), Splits(), Splits())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        super().__init__(model, optimizer, loss=mean_of_squares, backend="eager")


def test_parts_of_a_split_keep_the_whole() -> None:
    step, x = Deep(), torch.randn(8, 64, 32)
    step(x)
    assert step.inspect.memory.peak == pytest.approx(most_alive_bytes(step, x), abs=64)


# What the benchmark has in real sizes (benchmarks/memory.py), small.
MODELS = {
    "gpt small": _gpt(layers=1, width=32, vocabulary=128, context=16),
    "gpt mid": _gpt(layers=1, width=64, vocabulary=256, context=32),
}


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def trained(name: str, stage: int, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> LossStep:
    """Return a graph after two steps: the first update may be another program than the later ones."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    step = LossStep(model, optimizer(model.parameters()), stage, token_loss, bucket_size=16384, **options)
    for _ in range(2):
        step(*own_batch(name))
    return step


def own_batch(name: str) -> tuple[Tensor, ...]:
    return tuple(part(tensor) for tensor in MODELS[name][1](torch.Generator().manual_seed(1)))


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def matrices_by_muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2])


def predicted_and_seen(name: str, stage: int, optimizer: Any, options: dict[str, Any]) -> tuple[int, int]:
    step = trained(name, stage, optimizer, **options)
    return step.inspect.memory.peak, most_alive_bytes(step, *own_batch(name))


@sliced(
    "optimizer, options",
    [(matrices_by_muon, {})],
    [
        (torch.optim.SGD, {"shard_min_size": 512, "clip_grad_norm": 1.0}),
        (torch.optim.AdamW, {"clip_grad_norm": 1.0}),
    ],
)
def test_so_it_is_with_other_updates(pool: Pool, optimizer: Any, options: dict[str, Any]) -> None:
    for predicted, seen in pool.run(2, predicted_and_seen, "gpt small", 2, optimizer, options):
        assert predicted == pytest.approx(seen, rel=0.1)


def reports() -> list[tuple[zg.Memory, int, int, int]]:
    """Return the prediction of each stage, what is seen, and the bytes of its state and of the batch."""
    found = []
    step, batch = trained("gpt mid", 0, fused_adamw), own_batch("gpt mid")
    for stage in (0, 1, 2, 3):
        step.config.zero.stage = stage
        step(*batch)
        seen = most_alive_bytes(step, *batch)
        found.append((step.inspect.memory, seen, step.state_bytes(), sum(tensor.nbytes for tensor in batch)))
    return found


def test_the_peak_is_explained_by_kind(pool: Pool) -> None:
    every = pool.run(2, reports)[0]
    for memory, seen, state, batch in every:
        assert memory.peak == pytest.approx(seen, rel=0.1)
        assert sum(memory.kinds.values()) == memory.peak
        # Hyperparameters are tensors of one number.
        assert memory.at_rest == pytest.approx(state, abs=64)
        assert memory.kinds["inputs"] == pytest.approx(batch, abs=64)
        assert memory.kinds["activations"] > 0
        assert memory.node
        assert memory.where.source
        assert "MiB at " in str(memory)
        assert "activations " in str(memory)
    off, one, two, three = (memory for memory, *_ in every)
    for split in (one, two, three):
        assert split.kinds["optimizer state"] == pytest.approx(off.kinds["optimizer state"] / 2, rel=0.01)
    assert "gathered" not in off.kinds
    assert three.kinds["gathered"] < two.kinds["gathered"] / 2
