"""Whole parameters and optimizer state between steps: what a user writes to them is kept on all ranks, or on none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, covering, mean_of_squares, sliced
from tests.models import update_by
from tests.pool import Pool


class Step(LossStep):
    def __init__(self, stage: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        super().__init__(model, optimizer, stage, mean_of_squares)
        self.optimizer = optimizer


def part() -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    return x.chunk(zg.world_size())[zg.rank()]


def change_alone(stage: int, rank: int, runs: bool) -> None:
    step = Step(stage)
    if runs:
        step(part())
    before = step.state_dict()["modules"]["model"]
    for name, tensor in (("weight", step.model[0].weight), ("running_mean", step.model[1].running_mean)):
        message = f"{name}.*\n(.*\n)*No change was kept"
        with pytest.raises(zg.RankMismatchError, match=message), step.full_parameters(), torch.no_grad():
            tensor.add_(7.0 * (zg.rank() == rank))
        after = step.state_dict()["modules"]["model"]
        assert all(torch.equal(before[key], after[key]) for key in before)
    # The job goes on.
    step(part())


@sliced("stage, rank, runs", [(3, 0, True), (2, 1, False)], [(2, 1, True), (0, 1, True)])
def test_a_change_on_one_rank_is_an_error_and_nothing_of_it_is_kept(
    pool: Pool, stage: int, rank: int, runs: bool
) -> None:
    pool.run(2, change_alone, stage, rank, runs)


def modify() -> None:
    model = nn.Linear(8, 8)
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    model(part().float()).square().mean().backward()
    optimizer.step()
    with zg.full_parameters(model, modifier_rank=1), torch.no_grad():
        if zg.rank() == 1:
            model.weight.fill_(7.0)
    assert bool((model.state_dict()["weight"] == 7).all())
    for rank in (2, -1, 1.0, "1"):
        with pytest.raises(zg.ConfigError, match="ranks 0 to 1"), zg.full_parameters(model, modifier_rank=rank):  # type: ignore[arg-type]
            pass
    message = "(?s)first in modifier_rank:.*rank 1: 1"
    with pytest.raises(zg.RankMismatchError, match=message), zg.full_parameters(model, modifier_rank=zg.rank()):
        pass


def test_modifier_rank_gives_all_ranks_its_values(pool: Pool) -> None:
    pool.run(2, modify)


def modify_before_the_first_step() -> list[Tensor]:
    torch.manual_seed(zg.rank())
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.bias.fill_(float(zg.rank()))
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with zg.full_parameters(model), torch.no_grad():
        model.bias.add_(3)
    with zg.full_parameters(model, modifier_rank=1), torch.no_grad():
        model.weight.fill_(float(zg.rank()))
    model(part().float()).square().mean().backward()
    optimizer.zero_grad()
    return list(model.state_dict().values())


def test_before_the_first_step_a_block_begins_with_the_values_of_rank_0(pool: Pool) -> None:
    for weight, bias in pool.run(2, modify_before_the_first_step):
        assert bool((weight == 1).all())
        assert bool((bias == 3).all())


def fill_and_fail(weight: Tensor) -> None:
    weight.fill_(7.0)
    if zg.rank():
        raise ValueError("of rank 1")


def fail_alone() -> None:
    step = Step(3)
    step(part())
    with step.gathered_parameters(), pytest.raises(zg.InputError, match="lose its changes"), step.full_parameters():
        pass
    before = step.state_dict()["modules"]["model"]["0.weight"]
    expected = ValueError if zg.rank() else zg.RankMismatchError
    with pytest.raises(expected, match="of rank 1"), step.full_parameters(), torch.no_grad():
        fill_and_fail(step.model[0].weight)
    assert torch.equal(step.state_dict()["modules"]["model"]["0.weight"], before)


def test_an_error_in_the_block_on_one_rank_ends_it_on_all(pool: Pool) -> None:
    pool.run(2, fail_alone)


def load_differently() -> None:
    step = Step(3)
    step(part())
    before = step.state_dict()
    changed = step.state_dict()
    changed["modules"]["model"]["0.bias"].fill_(float(zg.rank()))
    moments = step.state_dict()
    moments["optimizers"][0]["state"][1]["exp_avg"].fill_(float(zg.rank()))
    for state, name in ((changed, "model.0.bias"), (moments, "exp_avg of parameter 1")):
        with pytest.raises(zg.RankMismatchError, match=f"{name}.*\n(.*\n)*Nothing was loaded"):
            step.load_state_dict(state)
    after = step.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    # The order of the names does not matter.
    weights = before["modules"]["model"]
    step.load_state_dict({"modules": {"model": dict(reversed(weights.items()) if zg.rank() else weights)}})


def test_a_state_that_differs_between_ranks_is_not_loaded(pool: Pool) -> None:
    pool.run(2, load_differently)


def plainly(edit: Callable[[Any, nn.Module], object], steps: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), edit, lambda _: None, steps)


def train(model: nn.Module, optimizer: Any, edit: Any, enter: Any, steps: int = 5) -> list[Tensor]:
    losses = []
    for number in range(steps):
        losses.append(update_by(optimizer, model(part()).square().mean()))
        if number == 2:
            context = enter(model)
            if context is None:
                edit(optimizer, model)
            else:
                with context:
                    edit(optimizer, model)
    return [torch.as_tensor(loss.item()) for loss in losses]


EDITS: dict[str, Callable[[Any, Any], object]] = {
    "zero": lambda optimizer, _: [entry["exp_avg"].zero_() for entry in optimizer.state.values()],
    "set": lambda optimizer, model: optimizer.state[model[0].weight].update(exp_avg=torch.ones(16, 8).double()),
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "delete": lambda optimizer, model: optimizer.state.__delitem__(model[0].weight),
    "nothing": lambda optimizer, _: sum(float(entry["exp_avg_sq"].mean()) for entry in optimizer.state.values()),
}


def edited(name: str, stage: int, in_block: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model, optimizer = zg.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage)
    return train(model, optimizer, EDITS[name], zg.full_parameters if in_block else lambda _: None)


EDITED = [("zero", 3, 2), ("set", 2, 2), ("clear", 3, 2), ("delete", 2, 2), ("nothing", 0, 1)]


@sliced("name, stage, ranks, in_block", *covering((*edit, place) for edit in EDITED for place in (True, False)))
def test_an_edit_of_the_optimizers_state_counts(pool: Pool, name: str, stage: int, ranks: int, in_block: bool) -> None:
    expected = plainly(EDITS[name])
    for losses in pool.run(ranks, edited, name, stage, in_block):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


def test_a_graphs_optimizer_does_not_pretend_to_have_no_state() -> None:
    step = Step(2)
    step(torch.ones(4, 8).double())
    with pytest.raises(zg.SplitParameterError, match="a graph has the state in shards"):
        len(step.optimizer.state)
    with step.full_parameters():
        assert len(step.optimizer.state) == 4
    step.optimizer.state = defaultdict(dict)
    with pytest.raises(zg.InputError, match="state of AdamW was replaced"):
        step(torch.ones(4, 8).double())


def read_alone() -> None:
    step = Step(2)
    step(part())
    message = r"reading AdamW.state|the end of full_parameters"
    with pytest.raises(zg.RankMismatchError, match=message), step.full_parameters():
        _ = [len(step.optimizer.state) for _ in range(zg.rank())]


def test_state_that_one_rank_alone_reads_is_an_error_on_all(pool: Pool) -> None:
    pool.run(2, read_alone)
