"""The cache of steps in loops of ``zg.prepare``: used where the loop makes the same calls, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.compiler.test_step_cache import cache_in
from tests.harness import sliced
from tests.models import part
from tests.pool import Pool

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(F.gelu(self.norm(self.first(x)))))


def train(folder: str, stage: int) -> tuple[list[float], list[Tensor], list[str], int]:
    """Run steps of several kinds; return losses, parameters, what the cache says, and the number of traces."""
    with cache_in(folder) as cache:
        torch.manual_seed(0)
        model = Net()
        model, optimizer = zg.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage)
        losses = []
        for backwards in (1, 1, 3):
            optimizer.zero_grad()
            for number in range(backwards):
                loss = F.cross_entropy(model(part(X) + number), part(Y)) * 0.5
                # The step pauses before backward() from the second time on.
                losses.append(loss.item())
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(part(X)).sum().item())
        return losses, list(model.state_dict().values()), cache.said, cache.traces


@sliced("stage", [3], [1, 2])
def test_steps_of_a_loop_are_kept_and_compute_the_same(pool: Pool, tmp_path: Path, stage: int) -> None:
    cold = pool.run(2, train, str(tmp_path), stage)
    warm = pool.run(2, train, str(tmp_path), stage)
    assert cold[0][3] > 2
    for (losses, state, _, _), (losses_again, state_again, said, traces) in zip(cold, warm, strict=True):
        assert traces == 0, said
        assert all("is used" in line for line in said)
        torch.testing.assert_close((losses_again, state_again), (losses, state), rtol=0, atol=0)


LIMIT = 1.0


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        result: Tensor = self.last(x.clamp(max=LIMIT) * self.factor) ** power
        return result


@dataclass
class Options:
    """The options of a loop."""

    factor: float = 1.0
    power: int = 1
    norm: float = 0.5
    scale: float = 0.5


def run(options: Options) -> None:
    """Make two steps of a loop."""
    torch.manual_seed(0)
    model: Any = Limited()
    model.factor = options.factor
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    for _ in range(2):
        optimizer.zero_grad()
        (F.cross_entropy(model(X, options.power), Y) * options.scale).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.norm)
        optimizer.step()


CHANGES: dict[str, Options] = {
    "a number in the loss": Options(scale=0.25),
    "an attribute of the model": Options(factor=2.0),
    "an argument of the model": Options(power=2),
    "a number of an edit of gradients": Options(norm=0.25),
}


def changed(folder: str) -> list[str]:
    """Return the changes after which the steps in the cache were used, and no other."""
    used = []
    with cache_in(folder) as cache, pytest.MonkeyPatch.context() as patch:
        run(Options())
        assert cache.files(), cache.said
        for name, options in {"nothing": Options(), **CHANGES}.items():
            before = cache.traces
            run(options)
            if cache.traces == before:
                used.append(name)
        patch.setitem(globals(), "LIMIT", 0.5)
        before = cache.traces
        run(Options())
        if cache.traces == before:
            used.append("a global that the model reads")
    return used


def test_a_step_of_a_loop_is_used_where_the_model_and_its_call_are_the_same(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, changed, str(tmp_path))[0] == ["nothing", "a number in the loss"]
