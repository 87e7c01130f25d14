"""States that a graph can take, and states that it refuses: whole, before anything changes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zerograph as zg
from tests.harness import LossStep, difference, in_turn, mean_of_squares, optimizer_of, sliced
from tests.models import TrainStep, batches, make, train_plainly
from zerograph.state.checks import check_scheduler

Make = Callable[[Any], torch.optim.Optimizer]
DATA = batches("mlp", 6)
optim = torch.optim
WAYS = ["a state", "a checkpoint"]
STARTS = ["before the first call", "after it"]
# A state after the first call and a checkpoint before it are other cells of the same claims.
PLACES = [*zip(STARTS, WAYS, strict=True), *zip(STARTS, WAYS[::-1], strict=True)]


def crossed(names: str, cases: Sequence[tuple[Any, ...]], more: Sequence[tuple[Any, ...]] = ()) -> Any:
    """Parametrize a test: each case, with a start and a way in turn."""
    chosen, rest = in_turn(cases, PLACES[:2])
    return sliced(f"{names}, start, way", chosen, [*rest, *in_turn([*cases, *more], PLACES)[1]])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.01, momentum=0.9)


def trained(optimizer: Make, steps: int = 2, backwards: bool = False) -> TrainStep:
    model = make("mlp")
    parameters = list(model.parameters())
    step = TrainStep(model, optimizer(parameters[::-1] if backwards else parameters), 2, backend="eager")
    for x, y in DATA[:steps]:
        step(x, y)
    return step


# Steps that are only read: nobody may train these further.
source_of = functools.cache(trained)


def load(step: TrainStep, source: TrainStep, way: str, folder: Path) -> None:
    if way == "a state":
        step.load_state_dict(source.state_dict())
    else:
        source.save(folder)
        step.load(folder)


def refused(step: TrainStep, call: Callable[[], None], words: str) -> None:
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(zg.ConfigError, match=words):
        call()
    assert not difference(step.state_dict(), before)
    step(*DATA[5])


@crossed(
    "source, kind, words",
    [
        (momentum, adamw, "of another optimizer than AdamW: its groups have momentum, .* and no betas, eps"),
        (momentum, lambda p: optim.RMSprop(p, momentum=0.9), "another optimizer than RMSprop"),
        (lambda p: optim.SGD(p, lr=0.01), optim.Adagrad, "another optimizer than Adagrad"),
        # The same hyperparameters.
        (optim.Adamax, optim.RAdam, "exp_avg, exp_inf, step of parameter 0 of RAdam, whose .* needs .*exp_avg_sq"),
    ],
)
def test_a_state_of_another_optimizer_changes_nothing(
    tmp_path: Path, way: str, start: str, source: Make, kind: Make, words: str
) -> None:
    step = trained(kind, STARTS.index(start))
    refused(step, lambda: load(step, source_of(source), way, tmp_path), words)


# The updates of Adafactor, one for each shape, take a second to trace.
@sliced(
    "kind, start, way",
    [*zip([momentum] * 2, STARTS, WAYS[::-1], strict=True), *zip([adamw] * 2, STARTS, WAYS, strict=True)],
    itertools.product((momentum, adamw, optim.Adafactor), STARTS, WAYS),
)
def test_a_state_of_parameters_in_another_order_changes_nothing(
    tmp_path: Path, way: str, start: str, kind: Make
) -> None:
    step = trained(kind, STARTS.index(start), backwards=True)
    refused(
        step,
        lambda: load(step, source_of(kind), way, tmp_path),
        "\nIt is the state of another .*, or of parameters in another",
    )


@crossed(
    "source, kind",
    [
        (lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1), lambda p: optim.AdamW(p, lr=0.5)),
        (lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1), lambda p: optim.Adam(p, lr=0.5)),
        (lambda p: optim.AdamW(p, lr=0.01, fused=True), lambda p: optim.AdamW(p, foreach=True, amsgrad=True)),
        (momentum, lambda p: optim.SGD(p, lr=0.5)),
        (lambda p: optim.SGD(p, lr=0.01), momentum),
        (lambda p: optim.NAdam(p, lr=0.01), adamw),
        (lambda p: optim.SGD([{"params": p, "name": "all"}], lr=0.01), momentum),
    ],
    [(lambda p: optim.Adafactor(p, lr=0.1), lambda p: optim.Adafactor(p, eps=(1e-30, 1e-3)))],
)
def test_what_torch_takes_goes_on_as_in_torch(tmp_path: Path, way: str, start: str, source: Make, kind: Make) -> None:
    saved, step = source_of(source), trained(kind, STARTS.index(start))
    state = copy.deepcopy(saved.state_dict())
    load(step, saved, way, tmp_path)
    model = make("mlp")
    plain = kind(model.parameters())
    model.load_state_dict(state["modules"]["model"])
    plain.load_state_dict(state["optimizers"][0])
    losses = [float(loss) for loss in train_plainly(model, plain, DATA[2:])]
    assert [float(step(x, y)) for x, y in DATA[2:]] == pytest.approx(losses, abs=1e-5)
    assert step.state_dict()["optimizers"][0]["param_groups"] == plain.state_dict()["param_groups"]


def test_a_state_older_than_a_hyperparameter_loads() -> None:
    step = trained(lambda p: optim.AdamW(p, amsgrad=True))
    state = copy.deepcopy(source_of(adamw).state_dict())
    for key in ("amsgrad", "foreach", "capturable", "decoupled_weight_decay"):
        del state["optimizers"][0]["param_groups"][0][key]
    for one in state["optimizers"][0]["state"].values():
        one["step"] = int(one["step"])
    step.load_state_dict(state)
    assert isinstance(step.state_dict()["optimizers"][0]["state"][0]["step"], Tensor)
    group = optimizer_of(step).param_groups[0]
    assert (group["amsgrad"], group["decoupled_weight_decay"]) == (False, True)


def test_graphs_that_load_one_state_share_nothing() -> None:
    rate = torch.tensor(0.1)
    state = trained(lambda p: optim.AdamW(p, lr=rate.clone())).state_dict()
    steps = []
    for _ in range(2):
        step = trained(lambda p: optim.AdamW(p, lr=rate.clone()), 0)
        step.load_state_dict(state)
        steps.append(step)
    steps[0]._optimizers[0].param_groups[0]["lr"].fill_(0.5)
    assert [float(optimizer_of(step).param_groups[0]["lr"]) for step in steps] == pytest.approx([0.5, 0.1])
    assert float(state["optimizers"][0]["param_groups"][0]["lr"]) == pytest.approx(0.1)


class Scheduled(LossStep):
    def __init__(self, schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = adamw(model.parameters())
        super().__init__(model, optimizer, loss=mean_of_squares, scheduler=schedule(optimizer), backend="eager")


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 5)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (at + 1))


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [lambda_lr(optimizer), step_lr(optimizer)], [2])


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False, scale_fn=lambda at: 1.0)


def group_with(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["optimizers"][0]["param_groups"][0].update(entries)


def scheduler_with(one: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(lr_schedulers=[one])


def random_with(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["random"].update(entries)


def numbered_by_texts(state: dict[str, Any]) -> None:
    held = state["optimizers"][0]["state"]
    state["optimizers"][0]["state"] = {str(number): one for number, one in held.items()}


@functools.cache
def scheduled(schedule: Callable[[torch.optim.Optimizer], Any]) -> tuple[Scheduled, dict[str, Any]]:
    """Return a graph after two steps, of which what is refused changes nothing, and its state after the first."""
    step = Scheduled(schedule)
    step(torch.ones(4, 3))
    state = copy.deepcopy(step.state_dict())
    step(torch.ones(4, 3))
    return step, state


def inner_lacks(state: dict[str, Any]) -> None:
    state["lr_schedulers"][0]["_schedulers"][0].pop("lr_lambdas")


@pytest.mark.parametrize(
    ("schedule", "change", "words"),
    [
        (step_lr, group_with(lr="abc"), "says lr = 'abc' of AdamW, which has 0.01: no such value"),
        (step_lr, group_with(lr=None), "says lr = None of AdamW"),
        (step_lr, group_with(betas=3), "says betas = 3 of AdamW"),
        (step_lr, group_with(fused="yes"), "says fused = 'yes' of AdamW"),
        (step_lr, group_with(params=[0, 0]), r"have the numbers \[0, 0\]: give each its own"),
        (step_lr, group_with(params=[[0], 1]), r"have the numbers \[\[0\], 1\]: give each its own"),
        (step_lr, numbered_by_texts, r"have the numbers \[0, 1\], their state is of \['0', '1'\]"),
        (step_lr, scheduler_with(5), r"lr_schedulers\[0\] is 5, not a dict"),
        (step_lr, scheduler_with({"x": 1}), "{'x': 1} is no state of StepLR: it lacks last_epoch"),
        (step_lr, scheduler_with({}), "{} is no state of StepLR: it lacks last_epoch"),
        (step_lr, scheduler_with({"last_epoch": "x"}), "says 'last_epoch' = 'x' of StepLR"),
        (step_lr, scheduler_with({"last_epoch": 1, "step": 1}), "says 'step' = 1 of StepLR"),
        (lambda_lr, scheduler_with({"last_epoch": 1}), "no state of LambdaLR: it lacks lr_lambdas"),
        (cyclic, scheduler_with({"last_epoch": 1}), "no state of CyclicLR: it lacks _scale_fn_custom"),
        (sequential, inner_lacks, "no state of LambdaLR: it lacks lr_lambdas"),
        (step_lr, random_with(seed="abc"), r"random\['seed'\] is 'abc', not an int"),
        (step_lr, random_with(seed=1.5), r"random\['seed'\] is 1.5, not an int"),
        (step_lr, random_with(passes="x"), r"random\['passes'\] is 'x', not a whole"),
        (step_lr, random_with(passes=-1), r"random\['passes'\] is -1, not a whole"),
    ],
)
def test_an_entry_that_could_not_be_one_changes_nothing(
    schedule: Callable[[torch.optim.Optimizer], Any], change: Callable[[dict[str, Any]], None], words: str
) -> None:
    step, state = scheduled(schedule)
    before, state = copy.deepcopy(step.state_dict()), copy.deepcopy(state)
    change(state)
    with pytest.raises(zg.ConfigError, match=words):
        step.load_state_dict(state)
    assert not difference(step.state_dict(), before)
    step(torch.ones(4, 3))


@pytest.fixture(scope="module")
def both() -> tuple[TrainStep, TrainStep]:
    """Two steps of AdamW, of which what is refused changes nothing."""
    return trained(adamw), trained(adamw)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("lr", float("nan")), ("lr", float("inf")), ("lr", -1.0), ("lr", True), ("lr", 10**400)),
        *(("weight_decay", float("nan")), ("eps", -1.0), ("betas", (0.9, float("nan"))), ("betas", (0.9, 1.5))),
        *(("initial_lr", float("nan")), ("amsgrad", 7), ("lr", torch.tensor(float("nan")))),
    ],
)
def test_a_hyperparameter_that_is_no_possible_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, both: tuple[TrainStep, TrainStep], tmp_path: Path, way: str, key: str, value: Any
) -> None:
    source, step = both
    monkeypatch.setitem(optimizer_of(source).param_groups[0], key, value)
    if way == "a state":
        state = source.state_dict()
        refused(step, lambda: step.load_state_dict(state), f"says {key} = ")
        return
    source.save(tmp_path)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(zg.CheckpointError, match=f"says {key} = "):
        step.load(tmp_path)
    assert not difference(step.state_dict(), before)


@pytest.mark.parametrize(("key", "value"), [("lr", -1e-12), ("lr", 0.0), ("betas", (0.0, 0.5)), ("weight_decay", 3)])
def test_hyperparameters_at_the_edge_are_taken(
    monkeypatch: pytest.MonkeyPatch, both: tuple[TrainStep, TrainStep], key: str, value: Any
) -> None:
    source, step = both
    monkeypatch.setitem(optimizer_of(source).param_groups[0], key, value)
    step.load_state_dict(source.state_dict())
    assert optimizer_of(step).param_groups[0][key] == value


def test_a_hyperparameter_that_the_graph_has_itself_is_taken() -> None:
    source, step = trained(momentum), trained(momentum)
    for one in (source, step):
        optimizer_of(one).param_groups[0]["weight_decay"] = -0.1
    step.load_state_dict(source.state_dict())


@pytest.mark.parametrize(("key", "value"), [("base_lrs", [float("nan")]), ("last_epoch", float("inf"))])
def test_a_scheduler_that_would_go_on_from_no_number_is_refused(key: str, value: Any) -> None:
    scheduler = lr_scheduler.StepLR(adamw(make("mlp").parameters()), 3)
    state = {**scheduler.state_dict(), key: value, "_schedulers": None}
    check_scheduler(scheduler, {**state, **scheduler.state_dict()})
    with pytest.raises(zg.ConfigError, match=f"says '{key}' = "):
        check_scheduler(scheduler, state)
