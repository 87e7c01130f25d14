"""Training a family on N ranks and on one device, and how far apart they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zerograph as zg
from tests.equivalence.family import Family
from tests.equivalence.mesh_layouts import Arrangement
from tests.harness import LossStep, deviation, each_stage, joined
from tests.models import part, update_by

State = dict[str, Tensor]
Stage = str | int

STEPS, SAMPLES = 3, 8
STAGES: tuple[Stage, ...] = ("off", 1, 2, 3)


@dataclass(frozen=True)
class Result:
    """The loss of every step, and the model's parameters and buffers after the last."""

    losses: list[Tensor]
    state: State


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With a large epsilon: where a gradient is zero in exact arithmetic (the bias of attention's keys), Adam would
    scale the rounding noise there to full steps, and no two orders of summation agree on noise."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.1)


def make(family: Family, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return family.make().to(dtype)


def batches(family: Family, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    made = [family.batch(generator, SAMPLES) for _ in range(STEPS)]
    return [tuple(x.to(dtype) if x.is_floating_point() else x for x in batch) for batch in made]


def train_plainly(family: Family, dtype: torch.dtype = torch.float32) -> Result:
    """Plain PyTorch on whole batches: the expected values."""
    model = make(family, dtype)
    update = optimizer(model)
    losses = [update_by(update, model(*batch)) for batch in batches(family, dtype)]
    return Result(losses, {name: value.clone() for name, value in model.state_dict().items()})


def train(
    family: Family,
    dtype: torch.dtype = torch.float32,
    stages: Sequence[Stage] = STAGES,
    bucket_size: int | None = None,
    arrangement: Arrangement | None = None,
    backend: str = "auto",
) -> tuple[dict[Stage, Result], LossStep]:
    """Each stage from the same beginning, as the rank that this is; one graph, so that it is captured once."""
    model = make(family, dtype)
    step = LossStep(model, optimizer(model))
    step.config.zero.bucket_size, step.config.backend = bucket_size, backend
    own = part if arrangement is None else arrangement.part
    if arrangement is not None:
        arrangement.place(model)
        step.config.mesh.placement = zg.placement("cpu", ranks=torch.tensor(arrangement.ranks).tolist())
        step.config.mesh.input_sbp = arrangement.input_sbp
        step.config.set(**dict(arrangement.options))
    results: dict[Stage, Result] = {}
    numbers = [0 if stage == "off" else int(stage) for stage in stages]
    for stage, _ in zip(stages, each_stage(step, numbers), strict=True):
        losses = [step(*map(own, batch)) for batch in batches(family, dtype)]
        results[stage] = Result(losses, step.state_dict()["modules"]["model"])
    return results, step


def largest_deviation(found: Result, wanted: Result) -> float:
    """The largest of those of every loss, and of all parameters and buffers joined (see ``test_stages.check``)."""
    if found.state.keys() != wanted.state.keys():
        raise AssertionError(f"the states have different names: {found.state.keys() ^ wanted.state.keys()}")
    losses = [deviation(one, other) for one, other in zip(found.losses, wanted.losses, strict=True)]
    return max(*losses, deviation(joined(found.state), joined(wanted.state)))


def equal(found: Result, wanted: Result) -> bool:
    """Bit by bit."""
    losses = all(map(torch.equal, found.losses, wanted.losses))
    return losses and all(torch.equal(found.state[name], value) for name, value in wanted.state.items())
