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

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.compat.oneflow import formulas
from tests.compat.oneflow.samples import LossGraph
from tests.harness import sliced
from tests.models import update_by
from tests.pool import Pool
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


def run(name: str, chosen: list[dict[str, Any]], stages: tuple[int, ...] = (0,)) -> list[list[Any]]:
    """For each stage every parameter [count, SIZE] after each step. One graph, so captured once."""
    start, rows = start_and_gradients(len(chosen))
    model: Any = Products(start)
    groups = [{"params": [weight], **case} for weight, case in zip(model.weights, chosen, strict=True)]
    graph = LossGraph(model, CHECKS[name][0](groups), stages[0])
    initial = graph.state_dict()
    found = []
    for stage in stages:
        if stage:
            graph.config.enable_zero(True, stage=stage, shard_min_size=1)
        graph.load_state_dict(initial)
        after = []
        for one in rows:
            graph(torch.from_numpy(one).chunk(flow.env.get_world_size())[flow.env.get_rank()])
            after.append(np.stack([value.numpy() for value in model.state_dict().values()]))
        found.append(after)
    return found


def expected(name: str, chosen: list[dict[str, Any]]) -> list[Any]:
    start, rows = start_and_gradients(len(chosen))
    gradients = [one.sum(axis=0) for one in rows]
    each = [
        formulas.trained(CHECKS[name][1], start[number], [one[number] for one in gradients], case)
        for number, case in enumerate(chosen)
    ]
    return [np.stack([steps[step] for steps in each]) for step in range(STEPS)]


def covering(name: str) -> list[dict[str, Any]]:
    """Return few cases that have all values of every option, plain and clipped."""
    missing = {
        (number, option, value)
        for number, values in enumerate(CHECKS[name][2])
        for option in values
        for value in values[option]
    }
    numbered = [(number, case) for number, values in enumerate(CHECKS[name][2]) for case in combinations(values)]
    chosen = []
    while missing:
        number, case = max(numbered, key=lambda one: len(missing & {(one[0], *item) for item in one[1].items()}))
        missing -= {(number, *item) for item in case.items()}
        chosen.append(case)
    return chosen


@sliced("name", ["sgd", "lamb"], CHECKS)
def test_cases_of_upstream_have_upstreams_numbers(name: str) -> None:
    chosen = covering(name)
    np.testing.assert_allclose(run(name, chosen)[0], expected(name, chosen), rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_every_case_of_upstream_has_upstreams_numbers(name: str) -> None:
    chosen = cases(name)
    np.testing.assert_allclose(run(name, chosen)[0], expected(name, chosen), rtol=1e-9, atol=1e-9)


# Those whose update is not torch's.
OWN = ("sgd", "adam", "adamw", "rmsprop", "lamb", "ftrl")


def few(name: str) -> list[dict[str, Any]]:
    return cases(name)[::17][:3] + cases(name)[-1:]


def at_stages(stages: dict[str, tuple[int, ...]]) -> dict[str, list[list[Any]]]:
    return {name: run(name, few(name), chosen) for name, chosen in stages.items()}


# Of norms, and with state of its own. The formulas of all are shown on one rank.
@sliced("stages", [{"lamb": (3,), "ftrl": (1,)}], [dict.fromkeys(OWN, (1, 2, 3))])
def test_two_ranks_at_every_stage_have_upstreams_numbers(pool: Pool, stages: dict[str, tuple[int, ...]]) -> None:
    for rank in pool.run(2, at_stages, stages):
        for name in stages:
            for stage in rank[name]:
                np.testing.assert_allclose(stage, expected(name, few(name)), rtol=1e-9, atol=1e-9)


# By optimizer: what a script changes between steps.
CHANGED: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.7, "dampening": 0.2}, {"maximize": True}, {"nesterov": False}],
    "adamw": [{}, {"weight_decay": 0.0}, {"betas": (0.8, 0.95)}, {"eps": 1e-3}],
    "rmsprop": [{}, {"alpha": 0.8}, {"eps": 1e-2}, {"weight_decay": 0.0}],
    "lamb": [{}, {"weight_decay": 0.0}, {"betas": (0.8, 0.95)}, {"lr": 0.01}],
    "ftrl": [{}, {"lambda1": 0.2}, {"lambda2": 0.3}, {"lr_power": 0.4}],
}


@sliced("name", ["lamb"], CHANGED)
def test_options_that_change_between_steps_are_those_of_the_next(name: str) -> None:
    option = cases(name)[2]
    start, rows = start_and_gradients(1)
    model: Any = Products(start)
    optimizer = CHECKS[name][0]([{"params": list(model.parameters()), **option}])
    graph = LossGraph(model, optimizer, 0)
    expected, state = start[0], {}
    for number, (change, row) in enumerate(zip(CHANGED[name], rows, strict=False), 1):
        option |= change
        optimizer.param_groups[0].update(change)
        graph(torch.from_numpy(row))
        state["number"] = number
        expected = CHECKS[name][1](expected, row.sum(axis=0)[0], state, option)
        np.testing.assert_allclose(model.state_dict()["weights.0"], expected, rtol=1e-9, atol=1e-9)


def test_hooks_of_a_step_run_once_and_fused_updates_stay_torchs() -> None:
    torch.optim.AdamW([one()])
    calls = []
    for options in ({}, {"do_bias_correction": False}):
        weight = one()
        optimizer = flow.optim.AdamW([weight], **options)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        weight.cos().sum().backward()
        optimizer.step()
    assert calls == ["before", "after"] * 2
    start, rows = start_and_gradients(2)
    models: list[Any] = [Products(start), Products(start)]
    for model, kind in zip(models, (flow.optim.AdamW, torch.optim.AdamW), strict=True):
        graph = LossGraph(model, kind(model.parameters(), weight_decay=0.1, fused=True), 0)
        for row in rows[:3]:
            graph(torch.from_numpy(row))
        names = [str(node.target) for node in graph.inspect.graph.graph.nodes]
        assert any("fused_adamw" in name for name in names)
    for mine, torchs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(mine, torchs)


def one() -> Any:
    return nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))


def test_defaults_are_upstreams() -> None:
    def defaults(kind: Any, *keys: str) -> tuple[Any, ...]:
        return tuple(kind([one()]).defaults[key] for key in keys)

    optim = flow.optim
    assert defaults(optim.AdamW, "lr", "weight_decay", "do_bias_correction") == (0.001, 0, True)
    assert defaults(optim.Adam, "lr", "betas", "eps", "amsgrad") == (0.001, (0.9, 0.999), 1e-8, False)
    assert defaults(optim.RMSprop, "lr", "alpha", "centered") == (0.001, 0.99, False)
    assert defaults(optim.Adagrad, "lr", "eps") == (0.001, 1e-10)
    assert defaults(optim.SGD, "lr", "momentum", "dampening") == (0.001, 0, 0)
    assert defaults(optim.Adadelta, "lr", "rho", "eps") == (1.0, 0.9, 1e-6)
    assert defaults(optim.LAMB, "lr", "weight_decay", "adam_w_mode") == (0.001, 0, True)


def test_what_torch_computes_alike_stays_torchs_bit_by_bit() -> None:
    for mine, torchs, options in (
        (flow.optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
        (flow.optim.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
        (flow.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (flow.optim.Adadelta, torch.optim.Adadelta, {}),
        (flow.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.5}),
    ):
        weights = [one(), one()]
        optimizers = [kind([weight], **options) for kind, weight in zip((mine, torchs), weights, strict=True)]
        for _ in range(3):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                update_by(optimizer, weight.cos().sum())
        assert torch.equal(*weights)


def test_a_state_of_torchs_class_can_be_loaded() -> None:
    weights = [one(), one()]
    plain, mine = torch.optim.AdamW([weights[0]], lr=0.1), flow.optim.AdamW([weights[1]], do_bias_correction=False)
    weights[0].cos().sum().backward()
    plain.step()
    mine.load_state_dict(plain.state_dict())
    assert mine.param_groups[0]["do_bias_correction"] is False
    assert torch.equal(mine.state[weights[1]]["exp_avg"], plain.state[weights[0]]["exp_avg"])


def test_gradients_are_clipped_outside_a_graph_where_a_group_says_so() -> None:
    first, second = one(), one()
    optimizer = flow.optim.SGD(
        [{"params": [first], "clip_grad_max_norm": 0.5, "clip_grad_norm_type": 2.0}, {"params": [second]}]
    )
    (first.sum() + second.sum()).backward()
    with pytest.warns(UserWarning, match="give both to SGD"):
        optimizer.clip_grad()
    np.testing.assert_allclose(np.linalg.norm(first.grad), 0.5, rtol=1e-5)
    assert torch.equal(second.grad, torch.ones_like(second))


class Clips(LossGraph):
    def build(self, x: Tensor) -> Tensor:
        loss = super().build(x)
        self._optimizers[0].clip_grad()
        return loss


def test_clipping_inside_build_is_refused() -> None:
    start, rows = start_and_gradients(1)
    model: Any = Products(start)
    with pytest.raises(zg.CaptureError, match="clips the groups"):
        Clips(model, flow.optim.SGD(model.parameters()), 0)(torch.from_numpy(rows[0]))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda group: torch.optim.AdamW([{**group, "do_bias_correction": False}]), "AdamW has do_bias_correction"),
        (lambda group: flow.optim.SGD([{**group, "adam_w_mode": False}]), "SGD has adam_w_mode"),
        (lambda group: torch.optim.SGD([{**group, "lr_scale": 0.1}]), "SGD has lr_scale"),
        (lambda group: flow.optim.RMSprop([{**group, "momentum": 0.9}]), "no momentum"),
        (lambda group: flow.optim.LAMB([group], amsgrad=True), "amsgrad=True"),
        (lambda group: flow.optim.LAMB([group], betas=(0.9, 1.0)), "betas=1.0"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(make: Any, part: str) -> None:
    model: Any = Products(start_and_gradients(1)[0])
    with pytest.raises(zg.ConfigError, match=part):
        LossGraph(model, make({"params": list(model.parameters())}), 0)
