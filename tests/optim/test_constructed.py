"""Optimizers that create their state in the constructor compute what plain PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import optimizer_of
from tests.models import TrainStep, part, train_plainly
from tests.optim.test_update import data, model
from tests.pool import Pool


class Constructed(torch.optim.Optimizer):
    """Momentum whose state is created by the constructor: of one kind for matrices, of another for vectors."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.05})
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["mean"] = torch.full_like(param, 0.1)
                if kind == "count":
                    state["step"] = 0
                if kind == "start" and param.dim() == 2:
                    state["start"] = param.detach().clone()
                if kind in ("list", "tuple", "dict"):
                    size = torch.zeros_like(param)
                    state["rest"] = {"list": [size, "text"], "tuple": (size, None), "dict": {0: size}}[kind]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                update = state["mean"].mul_(0.9).add_(param.grad).clone()
                if "step" in state:
                    state["step"] += 1
                    update /= 1 - 0.9 ** state["step"]
                if "start" in state:
                    update += 0.1 * (param - state["start"])
                if "rest" in state:
                    update /= state["rest"][0].add_(param.grad.square()).sqrt() + 0.1
                param.sub_(group["lr"] * update)


def trained(graph: bool, stage: int, kind: str) -> list[Any]:
    """Return losses, parameters and the state of the optimizer; one parameter has no gradient."""
    net = model()
    net.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = Constructed(net.parameters(), kind)
    if not graph:
        return [train_plainly(net, optimizer, data()), net.state_dict(), optimizer.state_dict()["state"]]
    step = TrainStep(net, optimizer, stage)
    losses = [step(part(x), part(y)) for x, y in data()]
    state = step.state_dict()
    return [losses, dict(state["modules"]["model"]), state["optimizers"][0]["state"]]


def test_a_checkpoint_has_counts_of_the_constructor_too(tmp_path: Path) -> None:
    runs = []
    for folder in ("first", "second"):
        net = model()
        net.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        runs.append(TrainStep(net, Constructed(net.parameters(), "count"), 2))
        if folder == "second":
            runs[1].load(tmp_path / "first")
        runs[-1](*data()[0])
        runs[-1].save(tmp_path / folder)
    torch.testing.assert_close(runs[1](*data()[1]), plain_losses()[2], rtol=1e-12, atol=1e-12)


def plain_losses() -> list[Tensor]:
    net = model()
    return train_plainly(net, Constructed(net.parameters(), "count"), [data()[0], *data()])


def tensors(value: Any) -> list[Tensor]:
    return [
        torch.as_tensor(one).double()
        for one in torch.utils._pytree.tree_leaves(value)
        if isinstance(one, (Tensor, int))
    ]


@pytest.mark.parametrize(
    ("kind", "stage"), [("plain", 0), ("count", 2), ("start", 3), ("list", 2), ("tuple", 3), ("dict", 3)]
)
def test_state_from_the_constructor_is_that_of_plain_pytorch(pool: Pool, kind: str, stage: int) -> None:
    plain = trained(False, stage, kind)
    for losses, parameters, state in pool.run(2, trained, True, stage, kind):
        torch.testing.assert_close(losses, plain[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parameters, dict(plain[1]), rtol=1e-12, atol=1e-12)
        for number, entries in plain[2].items():
            torch.testing.assert_close(tensors(state[number]), tensors(entries), rtol=1e-12, atol=1e-12)


def resumed(prepared: bool, before: bool, kind: str) -> list[float]:
    net, batches = model(), data()
    optimizer = Constructed(net.parameters(), kind)
    train_plainly(net, optimizer, batches[:2])
    modules, state = net.state_dict(), optimizer.state_dict()
    net = model()
    optimizer = Constructed(net.parameters(), kind)
    if before:
        net.load_state_dict(modules)
        optimizer.load_state_dict(state)
    loader: Any = batches[2:]
    if prepared:
        net, optimizer, loader = zg.prepare(net, optimizer, loader, stage=3)
    if not before:
        net.load_state_dict(modules)
        optimizer.load_state_dict(state)
    return [loss.item() for loss in train_plainly(net, optimizer, loader)]


@pytest.mark.parametrize(("before", "kind"), [(True, "tuple"), (False, "count")])
def test_a_loop_resumes_from_state_that_the_constructor_has_made_first(pool: Pool, before: bool, kind: str) -> None:
    plain = resumed(False, before, kind)
    for losses in pool.run(2, resumed, True, before, kind):
        assert losses == pytest.approx(plain, rel=1e-12)


def test_a_step_that_needs_state_of_the_constructor_takes_no_empty_state() -> None:
    net = model()
    step = TrainStep(net, Constructed(net.parameters(), "count"), 2)
    step(*data()[0])
    state = step.state_dict()
    with pytest.raises(zg.ConfigError, match=r"nothing of parameter 0 of Constructed, whose step\(\) needs"):
        step.load_state_dict({"optimizers": [state["optimizers"][0] | {"state": {}}]})
    with pytest.raises(zg.ConfigError, match="nothing of parameter"), step.full_parameters():
        optimizer_of(step).state.clear()
    after = step.state_dict()["optimizers"][0]["state"]
    torch.testing.assert_close(after, state["optimizers"][0]["state"], rtol=0, atol=0)


def test_other_state_for_some_parameters_of_equal_shape_is_refused() -> None:
    net = model()
    optimizer = Constructed(net.parameters(), "plain")
    optimizer.state[net[0].weight]["start"] = torch.zeros(7, 7, dtype=torch.float64)
    with pytest.raises(zg.CaptureError, match=r"other state for some parameters of shape \(7, 7\)"):
        TrainStep(net, optimizer, 2)(*data()[0])


class Tuples(torch.optim.Optimizer):
    """Creates a tuple of tensors in its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("means", (torch.zeros_like(param), {}))
            param.sub_(0.05 * state["means"][0].mul_(0.9).add_(param.grad))


def test_lists_of_tensors_that_plain_steps_have_made_go_on_in_a_graph() -> None:
    losses = []
    for graph in (False, True):
        net = model()
        optimizer = Tuples(net.parameters())
        train_plainly(net, optimizer, data()[:2])
        step = TrainStep(net, optimizer, 2) if graph else None
        losses.append([step(*one) if step else train_plainly(net, optimizer, [one])[0] for one in data()[2:]])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
