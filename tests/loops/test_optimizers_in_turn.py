"""Optimizers of a loop over the same parameters: each has a state of its own, as in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zerograph as zg
from tests.harness import sliced
from tests.loops.scripts import Prepare, assert_like_one_process, samples
from tests.pool import Pool

# The parameters of the second optimizer; the first has all of the model, or of its first layer.
OVERLAPS: dict[str, tuple[Callable[[nn.Sequential], Any], Callable[[nn.Sequential], Any]]] = {
    "equal": (nn.Module.parameters, nn.Module.parameters),
    "fewer": (nn.Module.parameters, lambda model: model[2].parameters()),
    "more": (lambda model: model[0].parameters(), nn.Module.parameters),
}


def in_turn(prepare: Prepare, overlap: str) -> tuple[list[float], dict[str, Any], list[Any]]:
    """(losses, parameters, states of both optimizers) of a loop that also clips and reads gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    first, second = OVERLAPS[overlap]
    optimizers = [torch.optim.Adam(first(model), lr=1e-2), torch.optim.AdamW(second(model), lr=3e-3)]
    loader = torch.utils.data.DataLoader(samples(32, 6), batch_size=8)
    model, a, b, loader = prepare(model, *optimizers, loader)
    losses = []
    for x, y in loader:
        for optimizer, weight in ((a, 1.0), (b, 0.5)):
            loss = weight * F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            losses += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
            optimizer.step()
        # A gradient serves both.
        model.zero_grad()
        model(x).square().mean().backward()
        losses.append(next(model.parameters()).grad.sum().item())
        a.step()
        b.step()
    return losses, dict(model.state_dict()), [one.state_dict()["state"] for one in (a, b)]


@sliced("overlap, stage", [("fewer", 3)], [("equal", 0), ("more", 3)])
def test_each_optimizer_keeps_its_own_state(pool: Pool, overlap: str, stage: int) -> None:
    assert_like_one_process(pool, in_turn, overlap, stages=(stage,))


def test_optimizers_in_turn_compile_no_graph_again() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    model, a, b = zg.prepare(model, torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        # At the eighth compilation there would be one, and calls would run operator by operator.
        warnings.simplefilter("error", zg.ZeroGraphWarning)
        for _ in range(9):
            for optimizer in (a, b):
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                model.zero_grad()
