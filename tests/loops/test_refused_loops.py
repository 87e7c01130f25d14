"""A loop does what it does in plain PyTorch; where that is an error, it is one here too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.loops.scripts import Prepare, assert_like_one_process, prepare_at, unprepared
from tests.loops.test_prepare import X, Y, network, ready
from tests.pool import Pool


def twice(model: nn.Module, optimizer: Any) -> None:
    # The second call is a graph.
    for _ in range(2):
        loss = model(X).mean()
        loss.backward()
    loss.backward()


def changed_input(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        x = torch.zeros(2**15, 6, dtype=torch.float64)
        loss = model(x).square().mean()
        x.fill_(1.0)
        loss.backward()


def written_gradient(model: nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    next(model.parameters()).grad = torch.zeros(3).double()


def updated_since(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        out = model(X)
        F.cross_entropy(out.detach() + model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        out.mean().backward()


@pytest.mark.parametrize("see", ["register_hook", "retain_grad", "grad"])
def test_gradients_of_a_result_that_are_asked_for_late_are_an_error(see: str) -> None:
    model = with_features()
    model, _ = prepare_at(2)(model, torch.optim.SGD(model.parameters()))
    for _ in range(2):
        features, out = model(X)
        out.sum().backward()
    ask = {
        "register_hook": lambda: features.register_hook(abs),
        "retain_grad": features.retain_grad,
        "grad": lambda: torch.autograd.grad(out.sum(), features, allow_unused=True),
    }
    with pytest.raises(zg.InputError, match="Begin the loop with such calls"):
        ask[see]()


LOOPS: dict[str, tuple[Callable[[nn.Module, Any], None], str]] = {
    "one loss twice": (twice, "backward through the graph a second time"),
    "an input that changed": (changed_input, "changed in place|modified by an inplace operation"),
    "a gradient of another shape": (written_gradient, "to a tensor of size|data of a different size"),
    "a result of an updated model": (updated_since, "a parameter was changed between|modified by an inplace operation"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_may_not_do_is_an_error(name: str) -> None:
    loop, message = LOOPS[name]
    plain = network()
    with pytest.raises(RuntimeError):
        loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises((zg.ZeroGraphError, RuntimeError), match=message):
        loop(*ready())


def reads_alone(prepare: Prepare, place: str) -> list[float]:
    """Train; the first rank alone reads losses, at this place, once calls are graphs."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, batches = prepare(module, optimizer, [(X, Y)] * 5)
    printed = []

    for number, (x, y) in enumerate(batches):
        here = place if zg.rank() == 0 and number > 1 else ""
        loss = F.cross_entropy(model(x), y)
        if here == "before backward":
            printed.append(loss.item())
        loss.backward()
        if here == "before step":
            printed.append(loss.item())
        optimizer.step()
        if here == "after step":
            printed.append(loss.item())
        if here == "parameters":
            printed.append(sum(one.sum().item() for one in model.parameters()))
        optimizer.zero_grad()
    return printed


def is_refused(place: str) -> None:
    with pytest.raises(zg.errors.RankMismatchError, match=r"(no|before) 'if rank == 0'"):
        reads_alone(prepare_at(2), place)


@pytest.mark.parametrize("place", ["before backward", "before step", "parameters"])
def test_one_rank_that_reads_alone_is_an_error_and_no_hang(pool: Pool, place: str) -> None:
    pool.run(2, is_refused, place)


def scores_alone() -> None:
    module = network()
    model, optimizer = prepare_at(2)(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = (one.chunk(2)[zg.rank()] for one in (X, Y))
    for number in range(4):
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zg.rank() == 0 and number > 1:
            (out.argmax(1) == y).sum()


def is_refused_to_score() -> None:
    with pytest.raises(zg.errors.RankMismatchError):
        scores_alone()


def test_one_rank_that_computes_with_its_rows_alone_is_an_error_and_no_hang(pool: Pool) -> None:
    pool.run(2, is_refused_to_score)


def test_one_rank_alone_may_read_a_loss_after_its_update(pool: Pool) -> None:
    printed, nothing = pool.run(2, reads_alone, prepare_at(2), "after step")
    assert printed == pytest.approx(reads_alone(unprepared, "after step"), rel=1e-12)
    assert not nothing


def edited(model: nn.Module, x: Tensor, y: Tensor, own: float) -> None:
    F.cross_entropy(model(x), y).backward()
    model[0].weight.grad.mul_(1 + own)  # type: ignore[index, operator, union-attr]


def dropped(model: nn.Module, x: Tensor, y: Tensor, own: float) -> None:
    F.cross_entropy(model(x), y).backward()
    if own:
        model[0].weight.grad = None  # type: ignore[index]


# Backward of a step by a number that differs between ranks in the last step only.
APART: dict[str, Callable[[nn.Module, Tensor, Tensor, float], Any]] = {
    "a factor": lambda model, x, y, own: (F.cross_entropy(model(x), y) * (1 + own)).backward(),
    "a factor of an argument": lambda model, x, y, own: F.cross_entropy(model(x * (1 + own)), y).backward(),
    "a plain tensor": lambda model, x, y, own: (model(x) - torch.full((4,), own)).square().mean().backward(),
    "an index": lambda model, x, y, own: model(x)[torch.arange(4).roll(int(own))].sum().backward(),
    "a plain gradient": lambda model, x, y, own: model(x).backward(torch.full((8, 4), 1 + own)),
    "an edited gradient": edited,
    "a gradient of one rank": dropped,
}


def is_noticed(name: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare_at(2)(model, optimizer, [(X, Y)] * 4)

    def update(number: int, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        APART[name](model, x, y, float(zg.rank() * (number == 3)))
        optimizer.step()

    *first, last = [(number, *batch) for number, batch in enumerate(loader)]
    for one in first:
        update(*one)
    with pytest.raises(zg.errors.RankMismatchError, match=r"(numbers or plain tensors|accumulated gradients)"):
        update(*last)


@pytest.mark.parametrize("name", APART)
def test_ranks_that_compute_with_other_numbers_are_an_error(pool: Pool, name: str) -> None:
    pool.run(2, is_noticed, name)


# Numbers of one shape and placement, which ranks would add up by their order alone.
ALIKE: dict[str, Callable[[nn.Module, Tensor], list[Tensor]]] = {
    "operators": lambda model, x: [model(x).square().mean(), model(x).exp().mean(), model(x).abs().mean()],
    "pieces": lambda model, x: [one.square().mean() for one in model(x).chunk(4, 1)],
    "calls": lambda model, x: [model(x * factor).square().mean() for factor in (1, 2)],
    "results": lambda model, x: list(model(x).unbind(1)),
}


def in_another_order(prepare: Prepare, name: str, backward: bool) -> list[float]:
    """Read numbers of a call, or start backward from them, on rank 1 from the last one on."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = prepare(module, optimizer, [(X, Y)] * 3)
    read: list[float] = []
    for x, _ in loader:
        values = [one.sum() for one in ALIKE[name](model, x)]
        for value in reversed(values) if zg.rank() else values:
            if backward:
                value.backward(retain_graph=True)
            else:
                read.append(value.item())
        optimizer.step()
        read += [value.item() for value in values]
    return read


def is_noticed_in_order(name: str, backward: bool, alone: list[float]) -> None:
    try:
        read = in_another_order(prepare_at(2), name, backward)
    except zg.errors.RankMismatchError as error:
        assert "in the same order" in str(error) or "numbers or plain tensors" in str(error)  # noqa: PT017
    else:
        # Backward of calls in any order adds up the same gradients.
        assert backward
        assert name == "operators"
        assert read == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_ranks_that_read_numbers_in_another_order_are_an_error(pool: Pool, name: str, backward: bool) -> None:
    pool.run(2, is_noticed_in_order, name, backward, in_another_order(unprepared, name, backward))


Step = Callable[[nn.Module, Any, Tensor, Tensor], Any]


def test_optimizers_that_are_no_graph_are_refused_before_anything_runs() -> None:
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        model = network()
        with pytest.raises(zg.CaptureError, match=kind.__name__):
            prepare_at(2)(model, kind(model.parameters()))
        assert type(model) is nn.Sequential


def left_out(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Train by an optimizer that is not prepared, and a temperature that is in no module."""
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    own = torch.optim.LBFGS([*model.parameters(), scale], lr=0.5, max_iter=3)

    def loss() -> Any:
        own.zero_grad()
        value = F.cross_entropy(model(x) * scale, y)
        value.backward()
        return value

    return own.step(loss) + scale.item()


def no_backward(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.step()
    return model(x).sum()


def not_cleared(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def anomalies(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return not_cleared(model, optimizer, x, y)


def penalty_before(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Compute a penalty, and its gradient only after another call has changed the statistics of batch norm."""
    optimizer.zero_grad()
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    gradient.square().mean().backward()
    optimizer.step()
    return loss


def late_penalty(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Differentiate gradients from the third step on, when the calls are graphs."""
    optimizer.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    loss = F.cross_entropy(out, y)
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    if optimizer.calls > 2:
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + gradient.square().mean()
    loss.backward()
    optimizer.step()
    return loss


def another_optimizer(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Train a group that the optimizer gets later."""
    if len(optimizer.param_groups) == 1:
        F.cross_entropy(model(x), y).backward()
        optimizer.add_param_group({"params": [model.extra], "lr": 0.5})
    return not_cleared(model, optimizer, x, y + 0)


class WithFeatures(nn.Module):
    """Returns what its head reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.body(x))
        return features, self.head(features)


def penalty_by_features(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Differentiate one result by another, as StyleGAN2's length of paths."""
    optimizer.zero_grad()
    features, out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), features, create_graph=True)
    loss = F.cross_entropy(out, y) + gradient.square().sum(1).sqrt().mean()
    loss.backward()
    optimizer.step()
    return loss


def gradients_of_features(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Retain and double the gradient that features get from the result beside them, as maps of activation do."""
    optimizer.zero_grad()
    features, out = model(x)
    features.retain_grad()
    features.register_hook(lambda gradient: 2 * gradient)
    loss = F.cross_entropy(out, y) + features.square().mean()
    loss.backward()
    optimizer.step()
    return loss + features.grad.abs().sum()


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra = network(), nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) * self.extra
        return result


class WithCounts(nn.Module):
    """Counts values of which there may be more than it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) * x.sum(1).relu().long().bincount(minlength=1).max()
        return result


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def with_features() -> nn.Module:
    torch.manual_seed(0)
    return WithFeatures().double()


def with_extra() -> nn.Module:
    return WithExtra()


HABITS: dict[str, tuple[Step, Callable[[], nn.Module]]] = {
    "no backward": (no_backward, network),
    "an optimizer that is left out": (left_out, network),
    "detection of anomalies": (anomalies, network),
    "a late penalty": (late_penalty, network),
    "a penalty before batch norm's next call": (penalty_before, normalized),
    "a new group with a gradient": (another_optimizer, with_extra),
    "a penalty on gradients of a result": (penalty_by_features, with_features),
    "gradients of a result": (gradients_of_features, with_features),
    "more bins than asked for": (not_cleared, WithCounts),
}


def trained(prepare: Prepare, name: str) -> tuple[list[float], dict[str, Tensor]]:
    step, make = HABITS[name]
    model = make()
    trained = model.net if isinstance(model, WithExtra) else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, loader = prepare(model, optimizer, [(X, Y), (-X, Y), (X * 2, Y), (X + 1, Y)])
    losses = [float(step(model, optimizer, x, y).detach()) for x, y in loader]
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("name", HABITS)
def test_what_a_loop_may_do_does_what_it_does_in_one_process(pool: Pool, name: str) -> None:
    assert_like_one_process(pool, trained, name, stages=(2,))


@pytest.mark.parametrize(
    "options", [{"batch_norm": "local"}, {"stage": "auto"}, {"stage": 1, "wire": zg.wire("int8", feedback=True)}]
)
def test_an_option_of_whole_steps_is_refused_before_anything_is_prepared(options: dict[str, Any]) -> None:
    model = network()
    with pytest.raises(zg.ConfigError, match="steps that are one graph"):
        zg.prepare(model, config=zg.Config(**options))
    assert type(model) is type(network())
