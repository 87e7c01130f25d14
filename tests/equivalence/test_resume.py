"""Resume is exact: twenty steps are bitwise ten steps, a save, new processes, a load, and ten more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import difference
from tests.models import TrainStep, batches, part
from tests.optimizers import Lamb, Lars, Lion, Shampoo
from tests.pool import Pool

STEPS = 20
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    """Dropout, norms with running statistics, and shapes that divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Linear(11, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Step(TrainStep):
    def __init__(self, model: nn.Module, optimizers: Optimizers, stage: int, options: dict[str, Any]) -> None:
        first, *others = ((one, torch.optim.lr_scheduler.CosineAnnealingLR(one, 30)) for one in optimizers)
        super().__init__(model, first[0], stage, scheduler=first[1], backend="eager", **options)
        for optimizer, scheduler in others:
            self.add_optimizer(optimizer, scheduler)


def of(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizers]:
    return lambda model: [kind(model.parameters(), **options)]


def muon(model: nn.Module) -> Optimizers:
    matrices = [one for one in model.parameters() if one.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.02), of(torch.optim.AdamW, lr=0.01)(Vectors(model))[0]]


class Vectors(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.those = nn.ParameterList(one for one in model.parameters() if one.dim() < 2)


optim = torch.optim
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "adamw": of(optim.AdamW, lr=0.01),
    "fused adamw": of(optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "adam": of(optim.Adam, lr=0.01, weight_decay=0.01, maximize=True),
    "nadam": of(optim.NAdam, lr=0.01),
    "radam": of(optim.RAdam, lr=0.01),
    "adamax": of(optim.Adamax, lr=0.01),
    "sgd": of(optim.SGD, lr=0.1),
    "momentum": of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": of(optim.Adagrad, lr=0.01, lr_decay=0.1),
    "adadelta": of(optim.Adadelta, lr=0.5),
    "rmsprop": of(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "rprop": of(optim.Rprop, lr=0.01),
    "asgd": of(optim.ASGD, lr=0.01),
    "adafactor": of(optim.Adafactor, lr=0.05),
    "muon": muon,
    "lion": of(Lion, lr=0.01, decay=0.1),
    "lamb": of(Lamb, lr=0.01, decay=0.1),
    "lars": of(Lars, lr=0.1),
    "shampoo": of(Shampoo, lr=0.1),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"amp_dtype": torch.bfloat16},
    "fp16": {"amp_dtype": torch.float16},
    "accumulation": {"gradient_accumulation_steps": 2, "batch_norm": "local"},
}
# Optimizer, what it computes in, stage.
Case = tuple[str, str, int]
LONG: list[Case] = [
    *(("adamw", precision, stage) for precision in PRECISIONS for stage in range(4)),
    *((name, "fp32", 1 + at % 3) for at, name in enumerate(OPTIMIZERS)),
    ("adafactor", "accumulation", 3),
    ("fused adamw", "bf16", 1),
    *((name, "fp16", 1 + (at + 1) % 3) for at, name in enumerate(OPTIMIZERS)),
]
# It skips an overflow in front of a factorisation. AdamW, in one process: tests/state/test_save.py.
SHORT: list[Case] = LONG[-1:]


def new_step(case: Case) -> Step:
    name, precision, stage = case
    torch.manual_seed(0)
    model = Net()
    options = dict(PRECISIONS[precision])
    if precision == "fp16":
        # It overflows for some steps, and grows again: the scale at the save is neither the first nor the last.
        options["grad_scaler"] = zg.GradScaler(init_scale=2.0**28, growth_interval=3)
    return Step(model, OPTIMIZERS[name](model), stage, options)


def trained(step: Step, first: int, last: int) -> list[float]:
    return [float(step(part(x), part(y))) for x, y in batches("mlp", STEPS, 16)[first:last]]


def found_in(step: Step) -> dict[str, Any]:
    state = step.state_dict()
    return {key: state[key] for key in ("modules", "optimizers", "lr_schedulers", "steps_done", "grad_scaler")}


def saved_half_way(folder: Path, cases: list[Case]) -> list[tuple[list[float], dict[str, Any]]]:
    """Return for each case the last ten losses of twenty, and the state at the end."""
    answers = []
    for number, case in enumerate(cases):
        step = new_step(case)
        trained(step, 0, 10)
        step.save(folder / str(number))
        drawn = torch.rand(3)
        answers.append((trained(step, 10, STEPS), {**found_in(step), "drawn": drawn}))
    return answers


def gone_on(folder: Path, cases: list[Case]) -> list[tuple[list[float], dict[str, Any]]]:
    answers = []
    for number, case in enumerate(cases):
        step = new_step(case)
        if number % 2:
            # Into a graph that runs already, or into one that is yet to be compiled.
            trained(step, 0, 1)
        step.load(folder / str(number))
        # The state of torch's generator is that of the save.
        drawn = torch.rand(3)
        answers.append((trained(step, 10, STEPS), {**found_in(step), "drawn": drawn}))
    return answers


@pytest.fixture(scope="module")
def new_processes() -> Iterator[Pool]:
    """Two that have never seen what the others trained: here they only go on."""
    workers = Pool(2, hash_apart=False)
    yield workers
    workers.close(patience=60.0)


def check(pool: Pool, new_processes: Pool, folder: Path, cases: list[Case]) -> None:
    wanted = pool.run(2, saved_half_way, folder, cases)[0]
    found = new_processes.run(2, gone_on, folder, cases)[0]
    for case, one, other in zip(cases, found, wanted, strict=True):
        assert not difference(one, other, f"{case}:")
        assert len(set(other[0])) > 1


def test_training_goes_on_bitwise_in_new_processes(pool: Pool, new_processes: Pool, folder: Path) -> None:
    check(pool, new_processes, folder, SHORT)


@pytest.mark.long
def test_training_goes_on_bitwise_with_every_optimizer_and_precision(
    pool: Pool, new_processes: Pool, folder: Path
) -> None:
    for start in range(0, len(LONG), 8):  # so many at a time: checkpoints lie in memory
        check(pool, new_processes, folder / str(start), LONG[start : start + 8])
