"""Where data-parallel training usually deviates from one device: numbers that depend on more than a rank's samples."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.test_batch_norm import Normed
from tests.harness import LossStep, sliced
from tests.models import part, update_by
from tests.pool import Pool

SAMPLES, LENGTH, WORDS = 4, 6, 11


class Tokens(nn.Module):
    """Logits from an embedding with padding, whose weight the head shares, and its loss."""

    def __init__(self, *, tied: bool, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, padding_idx=0)
        self.head = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        weight = torch.linspace(0.5, 2.0, WORDS) if options.pop("weighted", False) else None
        self.loss = nn.CrossEntropyLoss(weight, **options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.embedding(tokens))).flatten(0, 1), targets.flatten())


class Contrast(nn.Module):
    """Every sample against every other of the whole batch, both ways, as in CLIP (arXiv 2103.00020, figure 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 8), nn.Linear(7, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1)
        logits = self.scale.exp() * a @ b.T
        pairs = torch.arange(len(left))
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


class Experts(nn.Module):
    """A router with its balancing loss over all tokens (Switch Transformers, arXiv 2101.03961, equation 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        best, chosen = chances.max(-1)
        sent = F.one_hot(chosen, 3).to(x.dtype)
        out = sum(sent[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        balance = 3 * (chances.mean((0, 1)) * sent.mean((0, 1))).sum()
        return F.mse_loss(best.unsqueeze(-1) * out, target) + 0.1 * balance


def _tokens(valid: list[int]) -> tuple[Tensor, Tensor]:
    """Sequences of these many tokens; behind them 0, and -100 as target."""
    inside = torch.arange(LENGTH) < torch.tensor(valid)[:, None]
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    return torch.where(inside, tokens, 0), torch.where(inside, tokens.roll(1, 1), -100)


CASES: dict[str, Any] = {
    "masked mean, ranks hold different numbers of tokens": lambda: (Tokens(tied=False), _tokens([6, 5, 1, 0])),
    "masked mean, the second rank holds none": lambda: (Tokens(tied=True), _tokens([6, 3, 0, 0])),
    "label smoothing": lambda: (Tokens(tied=True, label_smoothing=0.2), _tokens([2, 6, 4, 1])),
    "class weights": lambda: (Tokens(tied=False, weighted=True), _tokens([2, 6, 4, 1])),
    "class weights and label smoothing": lambda: (
        Tokens(tied=False, weighted=True, label_smoothing=0.1),
        _tokens([6, 6, 4, 1]),
    ),
    "batch norm": lambda: (Normed(), (torch.randn(SAMPLES, 3, 4, 4), torch.randn(SAMPLES))),
    "contrastive": lambda: (Contrast(), (torch.randn(SAMPLES, 5), torch.randn(SAMPLES, 7))),
    "load balancing": lambda: (
        Experts(),
        (torch.randn(SAMPLES, LENGTH, 5), torch.randn(SAMPLES, LENGTH, 5)),
    ),
}
STEPS = 2


def _made(name: str, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    """Made in fp32, so that both dtypes start from the same numbers."""
    torch.manual_seed(0)
    model, batch = CASES[name]()
    return model.to(dtype), [one.to(dtype) if one.is_floating_point() else one for one in batch]


def train(dtype: torch.dtype, names: list[str]) -> dict[str, Any]:
    """Losses and final state of each case."""
    found = {}
    for name in names:
        model, batch = _made(name, dtype)
        step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        losses = [step(*map(part, batch)) for _ in range(STEPS)]
        found[name] = torch.stack(losses), step.state_dict()["modules"]["model"]
    return found


# fp64 decides; fp32 shall be as near as it can be in two.
SINGLE = ["class weights and label smoothing", "batch norm"]


@functools.cache
def trained(pool: Pool, dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = pool.run(2, train, dtype, list(CASES) if dtype == torch.float64 else SINGLE)[0]
    return found


@sliced(
    "name, dtype, tolerance",
    [(name, torch.float64, 1e-10) for name in CASES],
    [(name, torch.float32, 1e-6) for name in SINGLE],
)
def test_two_ranks_compute_what_one_device_computes(
    pool: Pool, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    losses, state = trained(pool, dtype)[name]
    model, batch = _made(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = [update_by(optimizer, model(*batch)) for _ in range(STEPS)]
    torch.testing.assert_close(losses, torch.stack(wanted), rtol=tolerance, atol=tolerance)
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=tolerance, atol=tolerance)
