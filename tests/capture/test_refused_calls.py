"""Calls that build() must not make: updates and communication belong to the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.distributed import all_gather, all_gather_object, all_reduce, barrier, broadcast, reduce_scatter
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import zerograph as zg
from tests.harness import Step, inputs, model
from zerograph.ir.mesh import line


def refused(call: Callable[[Tensor], Any], message: str) -> None:
    """Check that ``call`` on the loss inside build() is a CaptureError that names its line."""

    def body(made: Any, x: Tensor) -> Tensor:
        loss: Tensor = made(x).square().mean()
        call(loss)  # called here
        return loss

    with pytest.raises(zg.CaptureError, match=message) as error:
        Step(model(), body).prepare(line(2, 0, "ranks"), *inputs([4]))
    assert "test_refused_calls.py:" in str(error.value)


class OwnUpdate(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, OwnUpdate])
def test_an_optimizer_that_is_not_registered_cannot_step_in_build(kind: Any) -> None:
    optimizer = kind(model().parameters())
    refused(lambda _: optimizer.step(), rf"build\(\) calls {kind.__name__}\.step\(\)")


def test_an_optimizer_steps_again_after_a_refusal() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    refused(lambda _: optimizer.step(), "calls SGD.step")
    before = made.weight.detach().clone()
    made(*inputs([4])).sum().backward()
    optimizer.step()
    assert not torch.equal(made.weight, before)


class OwnSchedule(LRScheduler):
    def get_lr(self) -> list[float]:
        return [0.1 / (self.last_epoch + 1) for _ in self.optimizer.param_groups]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 1),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, 10),
    "ReduceLROnPlateau": ReduceLROnPlateau,
    "SequentialLR": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [2]),
    "OwnSchedule": OwnSchedule,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_cannot_step_in_build(name: str) -> None:
    scheduler = SCHEDULES[name](torch.optim.SGD(model().parameters(), lr=0.1))
    rate = scheduler.optimizer.param_groups[0]["lr"]
    refused(lambda _: scheduler.step(1.0), rf"build\(\) calls {name}\.step\(\)")
    assert scheduler.optimizer.param_groups[0]["lr"] == rate


def test_gradients_may_be_cleared_in_build() -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)

    def body(made: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = made(x).square().mean()
        return loss

    Step(made, body).prepare(line(2, 0, "ranks"), *inputs([4]))


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda loss: dist.all_reduce(loss),
    "all_reduce, imported": lambda loss: all_reduce(loss.detach().clone()),
    "all_gather, imported": lambda loss: all_gather([torch.zeros_like(loss)], loss),
    "all_gather_into_tensor": lambda loss: dist.all_gather_into_tensor(torch.zeros(2), loss),
    "reduce_scatter, imported": lambda loss: reduce_scatter(torch.zeros_like(loss), [loss]),
    "broadcast, imported": lambda loss: broadcast(loss, 0),
    "all_to_all_single": lambda loss: dist.all_to_all_single(torch.zeros(1), loss),
    "send": lambda loss: dist.send(loss, 0),
    "barrier": lambda _: dist.barrier(),
    "barrier, imported": lambda _: barrier(),
    "of Python objects": lambda _: all_gather_object([None], 3),
    "all_reduce, functional": lambda loss: functional.all_reduce(loss, "sum", [0]),
    "all_reduce, differentiable": lambda loss: differentiable.all_reduce(loss),
    ".*all_reduce, differentiable and imported": lambda loss: differentiable_all_reduce(loss),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_in_build_is_refused_with_its_line(name: str) -> None:
    Step(model(), lambda made, x: made(x).sum())(*inputs([4]))  # joins the job, as a call does
    refused(COLLECTIVES[name], rf"build\(\) calls the collective {name.split(',')[0]}\n")


def test_the_number_of_ranks_may_be_asked_for() -> None:
    def body(made: Any, x: Tensor) -> Tensor:
        if dist.is_initialized():
            assert dist.get_rank() < dist.get_world_size()
        loss: Tensor = made(x).square().mean()
        return loss

    Step(model(), body).prepare(line(2, 0, "ranks"), *inputs([4]))
