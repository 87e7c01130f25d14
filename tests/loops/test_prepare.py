"""``zg.prepare`` in one process: what it returns, what loops may do, and what is an error on the user's line."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

import zerograph as zg
from tests.harness import in_turn, sliced
from tests.loops.scripts import unprepared
from tests.models import update_by
from zerograph.loops.loop import Loop
from zerograph.loops.prepare import loop_of as loop_of_module, release

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(8) % 4


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.ReLU(), nn.Linear(16, 4)).double()


def ready(*layers: nn.Module, lr: float = 0.1, stage: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(*layers)
    prepared: tuple[nn.Module, torch.optim.Optimizer] = zg.prepare(
        model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), stage=stage
    )
    return prepared


def loop_of(model: nn.Module) -> Loop:
    loop: Loop = next(model.parameters())._zerograph_loop  # type: ignore[attr-defined]
    return loop


def test_a_released_model_whose_parameters_were_read_and_changed_is_prepared_again() -> None:
    losses = []
    for is_prepared in (False, True):
        model = network()
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if is_prepared:
                release(model, optimizer)
                zg.prepare(model, optimizer)
            losses += [update_by(optimizer, F.cross_entropy(model(X), Y)).item() for _ in range(3)]
            # Whole from here on.
            with torch.no_grad():
                model.get_parameter("0.weight").mul_(0.5)
    assert losses[6:] == pytest.approx(losses[:6], rel=1e-12)


def test_objects_come_back_in_their_order() -> None:
    model, loader = network(), [(X, Y)]
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = zg.prepare(scheduler, loader, model, optimizer)
    assert prepared[0] is scheduler
    assert list(prepared[1]) == loader
    assert prepared[2:] == (model, optimizer)
    assert zg.prepare(network()).training


def test_the_stage_does_not_change_the_callers_configuration() -> None:
    config = zg.Config(shard_min_size=3)
    model = zg.prepare(network(), stage=3, config=config)
    assert config.zero.stage == 0
    assert loop_of_module(model).config.zero.stage == 3


MISTAKES: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "one of two again": (lambda model, _: (zg.prepare(model, network()), zg.prepare(model)), "prepared already"),
    "another loop's parameters": (
        lambda model, _: zg.prepare(
            network(), torch.optim.SGD(zg.prepare(model, torch.optim.SGD(model.parameters()))[0].parameters())
        ),
        "is prepared already",
    ),
    "no model": (lambda _, other: zg.prepare(other), "takes a model"),
    "a number": (lambda model, _: zg.prepare(model, 3), "got 3"),
    "a schedule alone": (
        lambda model, other: zg.prepare(model, torch.optim.lr_scheduler.StepLR(other, 1)),
        "not prepared",
    ),
    "a stage": (lambda model, _: zg.prepare(model, stage=4), r"stage = 4: .* choose 0, 1, 2 or 3"),
    "accumulation": (lambda model, _: zg.prepare(model, config=accumulating()), "call backward|Call backward"),
}


def accumulating() -> zg.Config:
    config = zg.Config()
    config.gradient_accumulation_steps = 2
    return config


@pytest.mark.parametrize("name", MISTAKES)
def test_arguments_that_do_not_fit_are_named(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(zg.ConfigError, match=message):
        call(network(), torch.optim.SGD(network().parameters()))


def test_a_cell_that_prepares_and_trains_may_run_again() -> None:
    model, twin = network(), network()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        prepared = zg.prepare(zg.prepare(model, optimizer, stage=2)[0], optimizer, stage=3)
        for module, one in ((twin, plain), prepared):
            for _ in range(2):
                update_by(one, F.cross_entropy(module(X), Y))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)
    zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zg.ConfigError, match="prepared again without it"):
        optimizer.step()


def test_gradients_that_are_left_are_those_of_the_next_loop() -> None:
    def train(prepare: Any) -> list[float]:
        model, losses = network(), []
        for clears in (True, False):
            model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3):
                if clears:
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(X), Y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert train(zg.prepare) == pytest.approx(train(unprepared), rel=1e-12)


def test_a_forward_that_nobody_uses_still_counts_in_batch_norm() -> None:
    model, _ = ready(nn.BatchNorm1d(16))
    for _ in range(3):
        model(X)
    twin = network(nn.BatchNorm1d(16))
    for _ in range(3):
        twin(X)
    model.eval()
    assert torch.allclose(model(X).detach().clone(), twin.eval()(X))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_statistics_of_batch_norm_are_there_when_update_bn_returns() -> None:
    (model, _), twin = ready(nn.BatchNorm1d(16)), network(nn.BatchNorm1d(16))
    for module in (model, twin):
        update_bn([X, X * 2, X + 1], module)
    # Read from the module: a state dict would run what waits.
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(model[1], name), getattr(twin[1], name))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_batch_norm_that_a_checkpoint_computes_again_counts_again_in_each_call() -> None:
    (model, _), twin = ready(Recomputed()), network(Recomputed())
    for module in (model, twin):
        for scale in (1, 2, 3):
            module(X * scale).sum().backward()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert model.state_dict()["1.norm.num_batches_tracked"] == 6


def test_a_forward_without_gradients_beside_one_with_them_counts_too() -> None:
    model, optimizer = ready(nn.BatchNorm1d(16))
    for scale in (1, 2):
        out = model(X)
        with torch.no_grad():
            target = model(X * scale).softmax(1)
        update_by(optimizer, F.cross_entropy(out, target))
    assert model.state_dict()["1.num_batches_tracked"] == 4


def losses_of(between: Callable[[nn.Module], object]) -> tuple[list[float], list[object]]:
    """Train with dropout, with other forward passes between the steps; return losses, and what these gave."""
    model, optimizer = ready(nn.Dropout(0.5))
    losses, given = [], []
    for _ in range(4):
        losses.append(update_by(optimizer, F.cross_entropy(model(X), Y)).item())
        given.append(between(model))
    return losses, given


def evaluated(model: nn.Module) -> object:
    model.eval()
    with torch.no_grad():
        value = model(X).sum().item()
    model.train()
    return value


def test_an_evaluation_between_steps_does_not_change_the_masks_of_the_training() -> None:
    losses, _ = losses_of(evaluated)
    assert losses == losses_of(lambda _: None)[0]


def test_an_evaluation_between_backward_and_step_changes_no_number() -> None:
    model, optimizer = ready(nn.BatchNorm1d(16))
    twin = network(nn.BatchNorm1d(16))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for module, one in ((model, optimizer), (twin, plain)):
        F.cross_entropy(module(X), Y).backward()
        module.eval()
        with torch.no_grad():
            seen.append(F.cross_entropy(module(X), Y).item())
        module.train()
        F.cross_entropy(module(-X), Y).backward()
        one.step()
        one.zero_grad()
    assert seen[0] == pytest.approx(seen[1], rel=1e-12)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)


def test_training_goes_on_from_state_dicts() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        return [update_by(optimizer, F.cross_entropy(model(X), Y)).item() for _ in range(steps)]

    model, optimizer = ready()
    train(model, optimizer, 2)
    states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    wanted = train(model, optimizer, 2)
    plain = network()
    plain.load_state_dict(states[0])
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain_optimizer.load_state_dict(copy.deepcopy(states[1]))
    assert train(plain, plain_optimizer, 2) == pytest.approx(wanted, rel=1e-12)
    again, other = ready(stage=3)
    train(again, other, 1)
    torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    again.load_state_dict(states[0])
    other.load_state_dict(states[1])
    # Else the next scheduler would start from the rate of the last one.
    assert "initial_lr" not in other.param_groups[0]
    assert train(again, other, 2) == pytest.approx(wanted, rel=1e-12)


class Scored(nn.Module):
    """A module that another prepared module has too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)


def test_two_modules_may_share_a_third_and_its_checkpoint_loads(tmp_path: Path) -> None:
    model, plain = network(), network()
    model.register_buffer("unsaved", torch.zeros(3), persistent=False)
    scored = Scored(model)
    model, scored, optimizer = zg.prepare(model, scored, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    for _ in range(2):
        update_by(optimizer, scored(X, Y))
    twin = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        update_by(twin, F.cross_entropy(plain(X), Y))
    graph = loop_of(model).graph(optimizer)
    graph.save(tmp_path / "checkpoint")
    with torch.no_grad(), graph.full_parameters():
        model[0].weight.zero_()
    graph.load(tmp_path / "checkpoint")
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_fused_optimizer_updates_by_the_sum_of_several_backwards() -> None:
    model, plain = network(), network()
    model, optimizer = zg.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), stage=2)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        for module, trained in ((model, optimizer), (plain, twin)):
            trained.zero_grad()
            for part in (slice(0, 4), slice(4, 8)):
                F.cross_entropy(module(X[part]), Y[part]).backward()
            trained.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_layer_that_thaws_is_trained_with_the_others() -> None:
    states = []
    for prepared in (False, True):
        model = network()
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        if prepared:
            model, optimizer = zg.prepare(model, optimizer, stage=2)
        for step in range(3):
            if step == 1:
                model[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
            output = model(X)
            output.backward(F.softmax(output.detach(), 1) - F.one_hot(Y, 4))
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        states.append(dict(model.state_dict()))
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)


def test_a_model_and_a_criterion_compiled_after_it_was_prepared_run_as_they_are() -> None:
    losses = []
    for compiled in (False, True):
        model, optimizer = ready(stage=3)
        # Dynamo and autograd see what they see under Inductor, whose code takes its compiler many seconds.
        called: Any = torch.compile(model, backend="aot_eager") if compiled else model
        criterion: Any = torch.compile(F.cross_entropy, backend="aot_eager") if compiled else F.cross_entropy
        for _ in range(2):
            loss = update_by(optimizer, criterion(called(X), Y))
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("in_block", [True, False])
def test_a_copy_of_a_prepared_model_is_a_plain_one(in_block: bool) -> None:
    model, optimizer = ready(stage=3)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    prepared = type(model)
    with zg.full_parameters(model) if in_block else contextlib.nullcontext():
        copied = copy.deepcopy(model)
    assert type(copied) is nn.Sequential
    assert type(model) is prepared
    torch.testing.assert_close(dict(copied.state_dict()), dict(model.state_dict()))
    with pytest.raises(zg.ConfigError, match="has not prepared"), zg.full_parameters(copied):
        pass
    before = copied(X)
    update_by(optimizer, F.cross_entropy(model(X), Y))
    assert torch.equal(copied(X), before)
    assert not torch.equal(model(X), before)


def test_a_prepared_model_is_not_pickled_but_its_copy_is() -> None:
    model, _ = ready()
    with pytest.raises(zg.ConfigError, match=r"cannot be pickled.*\nSave model.state_dict\(\); or, inside"):
        pickle.dumps(model)
    with zg.full_parameters(model):
        copied = copy.deepcopy(model)
        read = [parameter.detach() for parameter in copied.parameters()]
        loaded = pickle.loads(pickle.dumps(copied))
        torch.testing.assert_close(list(loaded.parameters()), read, rtol=0, atol=0)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()))


@sliced("copying, stage", *in_turn([copy.deepcopy, pickle.dumps, copy.copy], (2, 3)))
def test_an_optimizer_whose_state_the_graph_has_is_copied_by_its_state_dict(
    copying: Callable[[object], object], stage: int
) -> None:
    model, optimizer = ready(stage=stage)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    message = r"SGD is copied or pickled.*\nSave or copy optimizer.state_dict\(\)"
    with pytest.raises(zg.SplitParameterError, match=message):
        copying(optimizer)
    with zg.full_parameters(model), pytest.raises(zg.SplitParameterError, match=message):
        copying(optimizer)
    copied = copy.deepcopy(optimizer.state_dict())
    with zg.full_parameters(model):
        plain = copy.deepcopy(model)
    another = torch.optim.SGD(plain.parameters(), lr=0.1)
    another.load_state_dict(copied)
    for network, its_optimizer in ((model, optimizer), (plain, another)):
        update_by(its_optimizer, F.cross_entropy(network(X), Y))
    torch.testing.assert_close(dict(plain.state_dict()), dict(model.state_dict()))


def test_before_the_first_step_a_copied_pair_trains_by_itself() -> None:
    model, optimizer = ready()
    plain, another = copy.deepcopy((model, optimizer))
    for _ in range(2):
        for network, its_optimizer in ((plain, another), (model, optimizer)):
            update_by(its_optimizer, F.cross_entropy(network(X), Y))
    assert type(plain) is nn.Sequential
    torch.testing.assert_close(dict(plain.state_dict()), dict(model.state_dict()))


def test_the_graphs_of_a_loop_can_be_looked_at(tmp_path: Path) -> None:
    model, optimizer = ready()
    with pytest.raises(zg.ConfigError, match="no training call of which is a graph yet"):
        zg.step_of(model)
    for _ in range(2):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    step = zg.step_of(model)
    assert "zerograph.pause" in step.inspect.text()
    assert step.inspect.memory.peak > 0
    step.inspect.report(tmp_path / "step.html")
    assert (tmp_path / "step.html").stat().st_size
    assert "addmm" in step.inspect.text()
    assert "addmm" not in zg.step_of(optimizer).inspect.text()
    with pytest.raises(zg.ConfigError, match="has not prepared"):
        zg.step_of(network())
