"""The optimizers of OneFlow's own graph tests (test_graph_optim_*.py): their cases, all groups of one graph.

A case here is one combination of options on a CPU; OneFlow's tolerance is 1e-3, ours 1e-9 in fp64.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zerograph.compat.oneflow as flow
from tests.compat.oneflow import formulas
from zerograph.compat.oneflow import nn

STEPS, SIZE, ROWS = 10, 10, 2
CLIP = {"clip_grad_max_norm": [1.0], "clip_grad_norm_type": [2.0]}
SGD = {"momentum": [0.9, 0.8], "dampening": [0.0, 0.9], "nesterov": [True, False], "maximize": [True, False]}
ADAM = {"betas": [(0.99, 0.9)], "eps": [1e-8], "do_bias_correction": [True, False], "amsgrad": [True, False]}
LAMB = {"betas": [(0.99, 0.9)], "eps": [1e-8, 1e-6], "do_bias_correction": [True, False], "adam_w_mode": [True, False]}
RMSPROP = {"alpha": [0.9, 0.99], "eps": [1e-8, 1e-5], "centered": [False, True], "momentum": [0.0]}
ADAGRAD = {"lr_decay": [0.9, 0.75], "initial_accumulator_value": [1.0, 2.1]}
FTRL = {
    "lr_power": [-0.5, 0.5],
    "initial_accumulator_value": [0.1, 0.05],
    "lambda1": [0.01],
    "lambda2": [0.0, 0.01],
    "beta": [1.0],
}
ADADELTA = {"rho": [0.9], "eps": [1e-6], "maximize": [False], "weight_decay": [0.1]}
RATES = {"lr": [1.0, 1e-3]}

# By name: the class, its formula, and the values of each option, plain and clipped.
CHECKS: dict[str, tuple[Any, formulas.Update, tuple[dict[str, list[Any]], ...]]] = {
    "sgd": (
        flow.optim.SGD,
        formulas.sgd,
        (
            {**RATES, **SGD, "weight_decay": [0.001, 0.0]},
            {"lr": [1.0, 0.1], **SGD, "momentum": [0.0, 0.9], "weight_decay": [0.0, 0.9], **CLIP},
        ),
    ),
    "adam": (
        flow.optim.Adam,
        formulas.adam,
        ({**RATES, **ADAM, "weight_decay": [0.001, 0.0]}, {**RATES, **ADAM, "weight_decay": [0.0, 0.9], **CLIP}),
    ),
    "adamw": (
        flow.optim.AdamW,
        formulas.adamw,
        ({**RATES, **ADAM, "weight_decay": [0.001, 0.0]}, {**RATES, **ADAM, "weight_decay": [0.0, 0.9], **CLIP}),
    ),
    "rmsprop": (
        flow.optim.RMSprop,
        formulas.rmsprop,
        (
            {"lr": [1.0, 10.0], **RMSPROP, "weight_decay": [0.1, 0.9]},
            {"lr": [1.0], **RMSPROP, "weight_decay": [0.0, 0.9], **CLIP},
        ),
    ),
    "adagrad": (
        flow.optim.Adagrad,
        formulas.adagrad,
        (
            {**RATES, **ADAGRAD, "eps": [1e-8, 1e-7], "weight_decay": [0.0, 0.1]},
            {**RATES, **ADAGRAD, "eps": [1e-8], "weight_decay": [0.0], **CLIP},
        ),
    ),
    "adadelta": (flow.optim.Adadelta, formulas.adadelta, ({**RATES, **ADADELTA}, {**RATES, **ADADELTA, **CLIP})),
    "lamb": (
        flow.optim.LAMB,
        formulas.lamb,
        (
            {"lr": [0.1, 1e-3], **LAMB, "weight_decay": [0.001, 0.1]},
            {"lr": [0.1, 1e-3], **LAMB, "weight_decay": [0.001, 0.1], **CLIP},
        ),
    ),
    "ftrl": (
        flow.one_embedding.FTRL,
        formulas.ftrl,
        ({**RATES, **FTRL, "weight_decay": [0.9, 0.0]}, {**RATES, **FTRL, "weight_decay": [0.9, 0.0], **CLIP}),
    ),
}


def combinations(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def cases(name: str) -> list[dict[str, Any]]:
    return [case for values in CHECKS[name][2] for case in combinations(values)]


def start_and_gradients(count: int) -> tuple[Any, list[Any]]:
    """Parameters [count, SIZE], and for each step rows [ROWS, count, SIZE] whose sum are their gradients."""
    random = np.random.default_rng(0)
    return random.uniform(size=(count, SIZE)), [random.uniform(size=(ROWS, count, SIZE)) / ROWS for _ in range(STEPS)]


class Products(nn.Module):
    """Multiply each parameter with its part of a row: the rows' sum is the gradient."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.from_numpy(one.copy())) for one in start)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([(weight * rows[:, number]).sum() for number, weight in enumerate(self.weights)]).sum()


class Step(nn.Graph):
    def __init__(self, model: Any, optimizer: Any, stage: int) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.backend = "eager"
        if stage:
            self.config.enable_zero(True, stage=stage, shard_min_size=1)

    def build(self, rows: Tensor) -> Tensor:
        loss = self.model(rows)
        loss.backward()
        return loss


def run(name: str, chosen: list[dict[str, Any]], stage: int = 0) -> list[Any]:
    """Every parameter [count, SIZE] after each step."""
    start, rows = start_and_gradients(len(chosen))
    model: Any = Products(start)
    groups = [{"params": [weight], **case} for weight, case in zip(model.weights, chosen, strict=True)]
    graph = Step(model, CHECKS[name][0](groups), stage)
    after = []
    for one in rows:
        graph(torch.from_numpy(one).chunk(flow.env.get_world_size())[flow.env.get_rank()])
        after.append(np.stack([value.numpy() for value in model.state_dict().values()]))
    return after


def expected(name: str, chosen: list[dict[str, Any]]) -> list[Any]:
    start, rows = start_and_gradients(len(chosen))
    gradients = [one.sum(axis=0) for one in rows]
    each = [
        formulas.trained(CHECKS[name][1], start[number], [one[number] for one in gradients], case)
        for number, case in enumerate(chosen)
    ]
    return [np.stack([steps[step] for steps in each]) for step in range(STEPS)]


@pytest.mark.parametrize("name", CHECKS)
def test_every_case_of_upstream_has_upstreams_numbers(name: str) -> None:
    chosen = cases(name)
    np.testing.assert_allclose(run(name, chosen), expected(name, chosen), rtol=1e-9, atol=1e-9)
