"""A loop that saves its parts and its position in the data goes on as if nothing had been, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import zerograph as zg
from tests.harness import sliced
from tests.pool import Pool

EPOCHS, ROWS = 2, 4


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are drawn anew each time."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((6,), index / 22) + 0.1 * torch.rand(6), torch.tensor(index % 4)


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([(torch.full((6,), index / 22), torch.tensor(index % 4)) for index in range(22)])


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Noisy(), ROWS, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        Noisy(), ROWS, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "streamed": lambda: DataLoader(Streamed(), ROWS),
    "a list": lambda: list(DataLoader(Streamed(), ROWS)),
}


def train(name: str, folder: Path, stage: int, until: int | None = None, *, goes_on: bool = False) -> list[float]:
    """Return the losses of a loop, which saves a checkpoint after so many batches, or goes on from that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer, loader = zg.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), LOADERS[name](), stage=stage
    )
    losses: list[float] = []
    passes = 0
    if goes_on:
        torch.rand(3)
        zg.step_of(optimizer).load(folder)
        position = torch.load(folder.with_suffix(".pt"))
        loader.load_state_dict(position["loader"])
        passes = position["passes"]
    while passes < EPOCHS:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(model(x), y).item())
            model.train()
            losses.append(loss.item())
            if len(losses) == 2 * (until or 0):
                zg.step_of(optimizer).save(folder)
                if zg.rank() == 0:
                    torch.save({"loader": loader.state_dict(), "passes": passes}, folder.with_suffix(".pt"))
        passes += 1
    return losses


# After one batch of a pass, after two, and at the last of one.
@sliced(
    "name, until, ranks",
    [("shuffled by a generator", 7, 2), ("shuffled", 6, 2), ("streamed", 8, 1)],
    [*((name, 8, 2) for name in LOADERS), ("a list", 8, 1), ("shuffled", 8, 1)],
)
def test_a_loop_goes_on_from_its_parts_and_its_position_on_any_number_of_ranks(
    pool: Pool, name: str, until: int, ranks: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    expected, _ = pool.run(2, train, name, folder, 3, until)
    for rest in pool.run(ranks, continued, name, folder, 3 if ranks == 2 else 0):
        assert rest == (expected[2 * until :] if ranks == 2 else pytest.approx(expected[2 * until :], rel=1e-5))
        assert rest


def continued(name: str, folder: Path, stage: int) -> list[float]:
    return train(name, folder, stage, goes_on=True)


class Attending(nn.Module):
    """Draws masks of several kinds. If it reads a value, its calls run operator by operator."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh())
        self.attend, self.out = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x).unsqueeze(1).expand(-1, 3, -1)
        x = self.attend(x, x, x)[0].mean(1) + 0.1 * torch.randn(8)
        if self.reads and x.sum().item() == 0:
            raise ValueError
        result: Tensor = self.out(nn.functional.gumbel_softmax(x) + torch.randn_like(x))
        return result


def from_state_dicts(folder: Path, stage: int, reads: bool, until: int = 6) -> list[float]:
    """Return the losses of six steps, or of those after a number of steps, from plain state that the loop has saved."""
    torch.manual_seed(0)
    model = Attending(reads=reads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The last of a pass has fewer rows, for which a call would be compiled anew, with sizes that are symbols.
    model, optimizer, loader = zg.prepare(model, optimizer, LOADERS["a list"]()[:-1] * 2, stage=stage)
    done = 0
    if until < 6:
        state = torch.load(folder.with_suffix(".pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        done = until
    losses = []
    for step, (x, y) in enumerate(loader):
        if step < done or step >= 6:
            continue
        if step == 3 and not done:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            if zg.rank() == 0:
                torch.save(state, folder.with_suffix(".pt"))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            model.net(x).sum().item()
        model.train()
    return losses


@sliced("stage, reads", [(3, False), (2, True)], [(2, False)])
def test_a_loop_goes_on_with_the_same_masks_from_plain_state(
    pool: Pool, stage: int, reads: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    expected, _ = pool.run(2, from_state_dicts, folder, stage, reads)
    for rest in pool.run(2, from_state_dicts, folder, stage, reads, 3):
        assert rest == pytest.approx(expected[3:], rel=1e-5)


def with_slopes(evaluates: bool) -> list[float]:
    """Return the losses of six steps of a model that draws slopes, evaluated between them or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.RReLU(), nn.Linear(16, 4))
    model, optimizer, loader = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), LOADERS["a list"]())
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluates:
            model.eval()
            model(x).sum().item()
            model.train()
    return losses


# In evaluation its operator is the same, and draws nothing.
def test_an_evaluation_does_not_move_the_slopes_of_a_randomized_relu() -> None:
    assert with_slopes(True) == with_slopes(False)
