"""Every loss of torch.nn: its value and gradient over the whole batch, and no sample leaves its rank."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import loss as losses

import zerograph as zg
from tests.harness import sliced
from tests.models import part
from tests.pool import Pool

SAMPLES, CLASSES = 4, 5


@dataclass(frozen=True)
class Case:
    """A loss and a batch for it; ``prepare`` makes of values what the loss wants, as of the last layer of a model."""

    make: Callable[[str], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    prepare: Callable[[Tensor], Tensor] = lambda x: x


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _values() -> Tensor:
    return _x(SAMPLES, CLASSES)


def _classes() -> Tensor:
    return torch.randint(CLASSES, (SAMPLES,))


def _signs(*shape: int) -> Tensor:
    return torch.randint(2, shape) * 2 - 1


def _sets() -> Tensor:
    """Classes of a sample, ended by -1: none, some and all of them."""
    return torch.tensor([[3, 0, -1, 1, 2], [1, -1, 0, 0, 0], [-1, 0, 0, 0, 0], [0, 1, 2, 3, 4]])


def _plain(name: str) -> Callable[[str], nn.Module]:
    def make(reduction: str) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):
            return getattr(losses, name)(reduction=reduction)

    return make


def _logs(x: Tensor) -> Tensor:
    return x.log_softmax(1)


class Ctc(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.loss = nn.CTCLoss(reduction=reduction, zero_infinity=True)

    def forward(self, x: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
        return self.loss(x.log_softmax(2).transpose(0, 1), targets, inputs, lengths)


class MaskedCtc(Ctc):
    """Takes padded targets, and concatenates those that a mask selects, as transformers does."""

    def forward(self, x: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
        mask = targets >= 0
        return super().forward(x, targets.masked_select(mask), inputs, mask.sum(-1))


class Adaptive(nn.Module):
    """The one loss without a choice of reduction."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(CLASSES, 12, [4, 8])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x, target).loss


def _spoken() -> tuple[Tensor, ...]:
    targets = torch.randint(1, CLASSES, (SAMPLES, 3))
    # The last sample is too short for its target.
    return _x(SAMPLES, 7, CLASSES), targets, torch.tensor([7, 6, 7, 2]), torch.tensor([3, 2, 1, 3])


def _padded() -> tuple[Tensor, ...]:
    x, targets, inputs, lengths = _spoken()
    return x, targets.masked_fill(torch.arange(3) >= lengths[:, None], -1).flip(1), inputs


def _pairs() -> tuple[Tensor, ...]:
    return _values(), _values()


CASES: dict[str, Case] = {
    "L1Loss": Case(_plain("L1Loss"), _pairs),
    "NLLLoss": Case(_plain("NLLLoss"), lambda: (_values(), _classes()), _logs),
    "NLLLoss2d": Case(
        _plain("NLLLoss2d"), lambda: (_x(SAMPLES, 3, 2, CLASSES), torch.randint(3, (SAMPLES, 2, CLASSES))), _logs
    ),
    "PoissonNLLLoss": Case(_plain("PoissonNLLLoss"), lambda: (_values(), _values().exp())),
    "GaussianNLLLoss": Case(_plain("GaussianNLLLoss"), lambda: (_values(), _values(), _values().exp())),
    "KLDivLoss": Case(_plain("KLDivLoss"), lambda: (_values(), _values().softmax(1)), _logs),
    "MSELoss": Case(_plain("MSELoss"), _pairs),
    "BCELoss": Case(_plain("BCELoss"), lambda: (_values(), _values().sigmoid()), torch.sigmoid),
    "BCEWithLogitsLoss": Case(_plain("BCEWithLogitsLoss"), lambda: (_values(), _values().sigmoid())),
    "HingeEmbeddingLoss": Case(_plain("HingeEmbeddingLoss"), lambda: (_values(), _signs(SAMPLES, CLASSES))),
    "MultiLabelMarginLoss": Case(_plain("MultiLabelMarginLoss"), lambda: (_values(), _sets())),
    "SmoothL1Loss": Case(_plain("SmoothL1Loss"), _pairs),
    "HuberLoss": Case(_plain("HuberLoss"), _pairs),
    "SoftMarginLoss": Case(_plain("SoftMarginLoss"), lambda: (_values(), _signs(SAMPLES, CLASSES).double())),
    "CrossEntropyLoss": Case(_plain("CrossEntropyLoss"), lambda: (_values(), _classes())),
    "MultiLabelSoftMarginLoss": Case(
        _plain("MultiLabelSoftMarginLoss"), lambda: (_values(), torch.randint(2, (SAMPLES, CLASSES)).double())
    ),
    "CosineEmbeddingLoss": Case(_plain("CosineEmbeddingLoss"), lambda: (*_pairs(), _signs(SAMPLES))),
    "MarginRankingLoss": Case(
        _plain("MarginRankingLoss"), lambda: (*_pairs(), _signs(SAMPLES)), lambda x: x.sum(1) if x.dim() == 2 else x
    ),
    "MultiMarginLoss": Case(_plain("MultiMarginLoss"), lambda: (_values(), _classes())),
    "TripletMarginLoss": Case(_plain("TripletMarginLoss"), lambda: (*_pairs(), _values())),
    "TripletMarginWithDistanceLoss": Case(_plain("TripletMarginWithDistanceLoss"), lambda: (*_pairs(), _values())),
    "CTCLoss": Case(Ctc, _spoken),
    "CTCLoss of masked targets": Case(MaskedCtc, _padded),
    "AdaptiveLogSoftmaxWithLoss": Case(Adaptive, lambda: (_values(), torch.randint(12, (SAMPLES,)))),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # from torch 2.13 on
    CASES["LinearCrossEntropyLoss"] = Case(
        lambda reduction: nn.LinearCrossEntropyLoss(CLASSES, 7, reduction=reduction), lambda: (_values(), _classes())
    )


class Losses(nn.Module):
    """All losses at once, each of values that a parameter of its own has scaled."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        either = itertools.cycle(("sum", "none") if reduction == "sum or none" else (reduction,))
        self.losses = nn.ModuleDict({name: case.make(next(either)) for name, case in CASES.items()})
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.randn(CLASSES)) for name in CASES})

    def forward(self, batch: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        found = {}
        for name, case in CASES.items():
            first, *rest = batch[name]
            second = [case.prepare(one * self.scales[name]) for one in rest if name in _TWO_SIDED and one.dim() > 1]
            found[name] = self.losses[name](case.prepare(first * self.scales[name]), *second, *rest[len(second) :])
        return found


# Losses of which several arguments come out of the model.
_TWO_SIDED = {"CosineEmbeddingLoss", "MarginRankingLoss", "TripletMarginLoss", "TripletMarginWithDistanceLoss"}


def _made(reduction: str) -> tuple[Losses, dict[str, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        return Losses(reduction).double(), {name: case.batch() for name, case in CASES.items()}


class Step(zg.ZeroGraph):
    def __init__(self, model: Losses) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, batch: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        found = self.model(batch)
        sum(one.square().sum() for one in found.values()).backward()
        return found


def train(reduction: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Losses, new parameters and what moved between the ranks but sums."""
    model, batch = _made(reduction)
    step = Step(model)
    with warnings.catch_warnings():
        # A rule that is missing would be a warning.
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="reduction: 'mean' divides")
        found = step({name: tuple(map(part, one)) for name, one in batch.items()})
    moved = [(one.kind, one.tensors) for one in step.inspect.collectives() if one.kind not in ("all-reduce", "slice")]
    return found, step.state_dict()["modules"]["model"], moved


@sliced("reduction", ["mean"], ["sum or none", "sum", "none"])
def test_every_loss_is_that_of_one_device_and_no_sample_moves(pool: Pool, reduction: str) -> None:
    results = pool.run(2, train, reduction)
    model, batch = _made(reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(action="ignore"):
        wanted = model(batch)
    sum(one.square().sum() for one in wanted.values()).backward()
    optimizer.step()
    for name, value in wanted.items():
        parts = [losses[name] for losses, _, _ in results]
        close(torch.cat(parts) if value.dim() else parts[0], value.detach(), name)
        assert value.dim() or torch.equal(*parts), name
    _, state, moved = results[0]
    for name, value in model.state_dict().items():
        close(state[name], value, name)
    assert moved == []


def close(found: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, msg=lambda message: f"{name}: {message}")


def test_all_losses_of_torch_are_here() -> None:
    assert set(losses.__all__) - set(CASES) == set()
