"""A user's optimizer is that of plain PyTorch, or refused: attributes and places of parameters, Python state."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerograph as zg
from tests.harness import sliced
from tests.models import TrainStep, part, train_plainly
from tests.optim.test_update import as_plainly, data, matrices, model, vectors
from tests.pool import Pool
from zerograph.optim.surroundings import is_known


class Scaled(torch.optim.Optimizer):
    """SGD whose rate ``scale`` changes: takes the optimizer, a group, the group's parameters, and an index there."""

    steps = 0

    def __init__(self, params: Any, scale: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.scale = scale
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                param.sub_(group["lr"] * self.scale(self, param, group["params"], index) * param.grad)


def marked(net: nn.Module) -> Scaled:
    for number, parameter in enumerate(net.parameters()):
        parameter.scale = 0.5**number  # type: ignore[attr-defined]
    return Scaled(net.parameters(), lambda self, param, params, index: getattr(param, "scale", 1.0))


OTHERWISE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "attributes": marked,
    "set": lambda net: Scaled(
        net.parameters(), lambda self, param, params, index: 0.5 if param in self.slow else 1.0, slow=set(matrices(net))
    ),
    "table of ids": lambda net: Scaled(
        net.parameters(),
        lambda self, param, params, index: self.scales.get(id(param), 1.0),
        scales={id(parameter): 0.5 for parameter in matrices(net)},
    ),
    "list": lambda net: Scaled(
        net.parameters(),
        lambda self, param, params, index: 0.5 if any(param is one for one in self.slow) else 1.0,
        slow=matrices(net),
    ),
    "index": lambda net: Scaled(net.parameters(), lambda self, param, params, index: 0.5**index),
    "number of parameters": lambda net: Scaled(net.parameters(), lambda self, param, params, index: 1 / len(params)),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_an_update_that_depends_on_which_parameter_it_is_is_refused(kind: str) -> None:
    net = model()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(zg.CaptureError, match=r"Scaled\.step\(\) updates model\.\d\.\w+ in another way than a param"):
        TrainStep(net, OTHERWISE[kind](net), 2)(*data()[0])
    assert all(map(torch.equal, net.parameters(), before))


def test_attributes_that_are_given_to_parameters_later_are_refused() -> None:
    net = model()
    step = TrainStep(net, Scaled(net.parameters(), lambda self, param, *_: getattr(param, "scale", 1.0)), 2)
    for batch in data()[:3]:
        step(*batch)
    net[0].weight.scale = 0.5
    with pytest.raises(zg.CaptureError, match=r"updates model\.0\.weight in another way"):
        step(*data()[3])


def counting_in_class(self: Any, *_: Any) -> float:
    type(self).steps += 1
    return 1 / type(self).steps


def counting_in_object(self: Any, *_: Any) -> float:
    self.own.steps += 1
    return 1 / self.own.steps


def counting_in_table(self: Any, *_: Any) -> float:
    self.table["steps"] += 1
    return 1 / self.table["steps"]


def counting_in_list(self: Any, *_: Any) -> float:
    self.numbers[0] += 1
    return 1 / self.numbers[0]


def by_text(self: Any, param: Tensor, *_: Any) -> float:
    state = self.state[param]
    state["phase"] = "slow" if state.get("phase") == "fast" else "fast"
    return 1.0 if state["phase"] == "fast" else 0.5


def by_length(self: Any, *_: Any) -> float:
    self.history.append("a step")
    return 1 / len(self.history)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (counting_in_class, r"keeps a value that changes from step to step: Scaled\.steps"),
        (counting_in_object, r"keeps a value that changes from step to step: self\.own\.steps"),
        (counting_in_table, r"keeps a value that changes from step to step: .*self\.table\['steps'\]"),
        (counting_in_list, r"keeps a value that changes from step to step: self\.numbers\[0\]"),
        (by_text, r"keeps a value that changes from step to step: state\['phase'\]"),
        (by_length, r"keeps a value that changes from step to step: len\(self\.history\)"),
        (lambda *_: random.random(), r"Scaled\.step\(\) draws random numbers of random"),
    ],
)
def test_python_values_that_change_are_refused_and_stay_as_they_are(scale: Any, message: str) -> None:
    net = model()
    own, table, history, numbers = SimpleNamespace(steps=0), defaultdict(int), ["before"], [0]
    optimizer = Scaled(net.parameters(), scale, own=own, table=table, history=history, numbers=numbers)
    drawn = random.getstate()
    with pytest.raises(zg.CaptureError, match=message):
        TrainStep(net, optimizer, 2)(*data()[0])
    assert (Scaled.steps, own.steps, dict(table), history, numbers) == (0, 0, {}, ["before"], [0])
    assert random.getstate() == drawn


def one_of(changes: tuple[Callable[..., None], ...], number: int) -> Callable[..., None]:
    """Return the change before a step: each has a step of its own, from the second on."""
    return changes[number - 1] if 0 < number <= len(changes) else lambda *_: None


def set_number(optimizer: Any) -> None:
    optimizer.strength = 0.25


def set_number_of_object(optimizer: Any) -> None:
    optimizer.own.strength = 0.25


def set_tensor(optimizer: Any) -> None:
    optimizer.tensor.fill_(0.25)


def replace_tensor(optimizer: Any) -> None:
    optimizer.tensor = optimizer.tensor / 4


def replace_array(optimizer: Any) -> None:
    optimizer.array = optimizer.array / 4


def set_tensor_of_group(optimizer: Any) -> None:
    # Printed tensors show four digits.
    optimizer.param_groups[0]["factor"].add_(1e-5)


def replace_tensor_of_group(optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["factor"] = group["factor"] + 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        # A small change while steps are large.
        (set_tensor_of_group, set_number, set_number_of_object, set_tensor),
        (replace_tensor_of_group, replace_tensor, replace_array),
    ],
)
def test_a_value_that_the_user_sets_between_steps_counts_from_then_on(
    changes: tuple[Callable[[Any], None], ...],
) -> None:
    def scale(self: Any, *_: Any) -> Any:
        factor = self.param_groups[0]["factor"]
        return self.strength * self.own.strength * self.tensor * torch.from_numpy(self.array)[0] * factor

    def made(net: nn.Module) -> Scaled:
        own, one = SimpleNamespace(strength=1.0), torch.ones((), dtype=torch.float64)
        # A large array: printed ones leave elements out.
        optimizer = Scaled(net.parameters(), scale, strength=2, own=own, tensor=one, array=numpy.ones(9000))
        optimizer.param_groups[0]["factor"] = torch.tensor(1.00012, dtype=torch.float64)
        return optimizer

    as_plainly(made, lambda optimizer, number: one_of(changes, number)(optimizer))


RATES = {"rate": 1.0}


class Rate:
    """A rate that a group holds, or an attribute."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def now(self) -> float:
        return self.rate * RATES["rate"]


class Changeable(Scaled):
    def factor(self) -> float:
        return 1.0


def set_global(optimizer: Any, patch: Any) -> None:
    patch.setitem(RATES, "rate", 0.5)


def replace_function(optimizer: Any, patch: Any) -> None:
    optimizer.scale = lambda *_: 0.5


def replace_function_in_object(optimizer: Any, patch: Any) -> None:
    optimizer.own.function = lambda: 0.5


def replace_function_of_group(optimizer: Any, patch: Any) -> None:
    optimizer.param_groups[0]["function"] = lambda: 0.5


def set_number_of_object_in_group(optimizer: Any, patch: Any) -> None:
    optimizer.param_groups[0]["table"]["object"].rate = 0.5


def set_number_beside_an_object(optimizer: Any, patch: Any) -> None:
    optimizer.param_groups[0]["table"]["rate"] = 0.5


def give_object_an_attribute(optimizer: Any, patch: Any) -> None:
    optimizer.own.further = 0.5


def replace_method(optimizer: Any, patch: Any) -> None:
    patch.setattr(Changeable, "factor", lambda self: 0.5)


def give_class_an_attribute(optimizer: Any, patch: Any) -> None:
    patch.setattr(Changeable, "further", 0.5, raising=False)


def replace_class(optimizer: Any, patch: Any) -> None:
    optimizer.__class__ = type("Halved", (Changeable,), {"factor": lambda self: 0.25})


@pytest.mark.parametrize(
    "changes",
    [
        (set_global, replace_function, replace_function_in_object, replace_function_of_group),
        (set_number_of_object_in_group, set_number_beside_an_object, give_object_an_attribute, give_class_an_attribute),
        (replace_method, replace_class),
    ],
)
def test_what_a_step_reads_by_name_counts_from_its_change_on(changes: tuple[Callable[[Any, Any], None], ...]) -> None:
    def scale(self: Any, *_: Any) -> float:
        group = self.param_groups[0]
        further = getattr(self.own, "further", 1.0) * getattr(self, "further", 1.0)
        table = group["table"]["object"].now() * group["table"]["rate"]
        return self.factor() * self.own.function() * group["function"]() * further * table

    def made(net: nn.Module) -> Scaled:
        optimizer = Changeable(net.parameters(), scale, own=SimpleNamespace(function=lambda: 1.0))
        table = {"object": Rate(1.0), "rate": 1.0}
        optimizer.param_groups[0].update(function=lambda: 1.0, table=table)
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        as_plainly(made, lambda optimizer, number: one_of(changes, number)(optimizer, patch))


class WithoutRate(torch.optim.Optimizer):
    """Takes small steps as long as its group has no learning rate, as transformers' Adafactor does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.01 if group["lr"] is None else group["lr"])


def test_torchs_own_optimizers_are_not_traced_as_a_users() -> None:
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and cls is not torch.optim.Optimizer]

    assert torch.optim.Muon in classes
    assert [cls for cls in classes if not is_known(cls.__new__(cls))] == []
    assert not is_known(object.__new__(type("Own", (torch.optim.Muon,), {})))


def test_an_optimizer_without_a_learning_rate_may_get_one() -> None:
    rates = (None, None, None, 0.1, 0.2)
    as_plainly(
        lambda net: WithoutRate(net.parameters()),
        lambda optimizer, number: optimizer.param_groups[0].update(lr=rates[number]),
    )


class Stacking(torch.optim.Optimizer):
    """As nanochat's: stacks matrices, communicates if there are several processes, keeps scratch tensors of itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})
        self.rate, self.momentum = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [param.grad for param in group["params"]]
            if dist.is_initialized() and dist.get_world_size() > 1:
                for gradient in gradients:
                    dist.all_reduce(gradient)
            means = torch._foreach_mul(gradients, 0.5)
            for param, mean in zip(group["params"], means, strict=True):
                self.state[param].setdefault("mean", torch.zeros_like(param)).lerp_(mean, 0.1)
            torch._foreach_add_(gradients, [self.state[param]["mean"] for param in group["params"]], alpha=0.5)
            if group["params"][0].dim() == 2:
                stacked = torch.stack(gradients)
                stacked = stacked / stacked.norm(dim=(-2, -1), keepdim=True)
                gradients = list((stacked @ stacked.mT @ stacked).unbind(0))
            self.rate.fill_(group["lr"])
            self.momentum.fill_(group["momentum"])
            torch._foreach_copy_(
                group["params"],
                [
                    param - self.rate * self.momentum * one
                    for param, one in zip(group["params"], gradients, strict=True)
                ],
            )


def stacking(graph: bool, stage: int) -> list[Tensor]:
    net = model()
    optimizer = Stacking([{"params": matrices(net)}, {"params": vectors(net)}])
    run = TrainStep(net, optimizer, stage) if graph else None
    losses = []
    for number, (x, y) in enumerate(data()):
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 0.1 * 0.9**number, 0.9 - 0.1 * number
        losses += [run(part(x), part(y))] if run else train_plainly(net, optimizer, [(x, y)])
    return [loss.detach() for loss in losses]


@sliced("stage", [3], [0, 2])
def test_an_optimizer_that_stacks_parameters_communicates_and_has_scratch_tensors_is_the_plain_one(
    pool: Pool, stage: int
) -> None:
    plain = stacking(False, stage)
    for losses in pool.run(2, stacking, True, stage):
        torch.testing.assert_close(losses, plain, rtol=1e-12, atol=1e-12)


class Centering(Stacking):
    """Subtracts the mean over all matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            stacked = torch.stack([param.grad for param in group["params"]])
            torch._foreach_sub_(group["params"], list((stacked - stacked.mean(0)).unbind(0)))


def test_an_optimizer_that_mixes_what_it_stacks_is_refused() -> None:
    net = model()
    step = TrainStep(net, Centering([{"params": matrices(net)}]), 2)
    with pytest.raises(zg.CaptureError, match=r"Centering updates a parameter from other parameters' values"):
        step(*data()[0])
