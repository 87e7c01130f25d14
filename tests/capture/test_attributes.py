"""Attributes that build() sets on modules are as in plain PyTorch, or refused; never fake after the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import Body, Step, as_plain_pytorch, inputs, model
from zerograph._torch import FakeTensor


def no_fakes(made: nn.Module) -> None:
    assert not any(isinstance(value, FakeTensor) for value in vars(made).values())
    assert not any(isinstance(value, FakeTensor) for value in made.buffers())


def table(made: Any, x: Tensor) -> Tensor:
    if not hasattr(made, "table"):
        made.table = torch.arange(4.0, dtype=x.dtype)
    return (made(x) * made.table).square().mean()


def longest(made: Any, x: Tensor) -> Tensor:
    """A table that grows with the batch, as those of rotary embeddings do."""
    if getattr(made, "longest", 0) < len(x):
        made.longest, made.rows = len(x), torch.arange(float(len(x)), dtype=x.dtype)
    return (made(x) * made.rows[: len(x), None]).square().mean()


def late_buffer(made: Any, x: Tensor) -> Tensor:
    if not hasattr(made, "late"):
        made.register_buffer("late", torch.ones(4, dtype=x.dtype) * 3, persistent=False)
    return (made(x) * made.late).square().mean()


@pytest.mark.parametrize("body", [table, longest, late_buffer])
def test_what_is_made_once_is_made_in_every_step(body: Body) -> None:
    no_fakes(as_plain_pytorch(model(), body, [4, 4, 8, 8, 2, 4]).model)


def counted(made: Any, x: Tensor) -> Tensor:
    made.calls = getattr(made, "calls", 0) + 1
    return made(x).square().mean() * made.calls


def test_a_count_of_calls_goes_on() -> None:
    assert as_plain_pytorch(model(), counted, [4, 4, 4]).model.calls == 3


def test_what_makes_a_step_be_compiled_again_and_again_is_named() -> None:
    with pytest.warns(UserWarning, match="step 8 is compiled for the 8th time .* has changed: modules: model\n"):
        as_plain_pytorch(model(), counted, [4] * 9)


def test_nothing_fake_stays_behind_an_error() -> None:
    def body(made: Any, x: Tensor) -> Tensor:
        made.table, made.calls = torch.arange(4.0), 1
        return (made(x) * made.table).sum() if x.sum() > 0 else x.sum()

    made = model()
    with pytest.raises(zg.CaptureError, match="read a tensor's value"):
        Step(made, body)(*inputs([4]))
    assert not {"table", "calls"} & set(vars(made))


def test_losses_scaled_twice_find_no_tensor_of_the_first_trace() -> None:
    class Twice(Step):
        def build(self, x: Tensor) -> Tensor:
            loss = table(self.model, x)
            loss.backward(retain_graph=True)
            loss.backward()
            return loss

    step = Twice(model(), table)
    step.config.precision.grad_scaler = zg.GradScaler(init_scale=2.0)
    assert step(*inputs([4])).item() == table(model(), *inputs([4])).item()


def assigned(made: Any, x: Tensor) -> Tensor:
    made.count = made.count + 1
    made.mean = 0.9 * made.mean + 0.1 * x.mean(0)
    return ((made(x) - made.mean) * made.count).square().mean()


def swapped(made: Any, x: Tensor) -> Tensor:
    made.mean, made.other = made.other, made.mean
    return (made(x) * made.mean).square().mean()


@pytest.mark.parametrize("body", [assigned, swapped])
def test_a_buffer_keeps_what_is_assigned_to_it(body: Body) -> None:
    double = torch.float64
    made = model(count=torch.zeros((), dtype=double), mean=torch.zeros(4, dtype=double), other=torch.ones(4).double())
    as_plain_pytorch(made, body, [4, 4, 4])


def carried_from_a_number(made: Any, x: Tensor) -> Tensor:
    made.total = getattr(made, "total", 0.0) + x.mean()
    return made(x).square().mean() * made.total


def carried_from_nothing(made: Any, x: Tensor) -> Tensor:
    hidden = made(x if getattr(made, "hidden", None) is None else x + made.hidden)
    made.hidden = hidden.detach()
    return hidden.square().mean()


def carried_in_a_list(made: Any, x: Tensor) -> Tensor:
    if not hasattr(made, "seen"):
        made.seen = []
    made.seen.append(x.mean())
    return made(x).square().mean() * sum(made.seen)


def a_tensor_written_in_place(made: Any, x: Tensor) -> Tensor:
    made.plain.mul_(0.9).add_(x.mean(0))
    return (made(x) * made.plain).sum()


def another_shape(made: Any, x: Tensor) -> Tensor:
    made.mean = x.mean(0)[:2]
    return made(x).square().mean()


def a_parameter_replaced(made: Any, x: Tensor) -> Tensor:
    loss = made(x).square().mean()
    made.weight = nn.Parameter(made.weight * 2)
    return loss


def scaled(made: Any, x: Tensor) -> Tensor:
    loss: Tensor = torch.amp.GradScaler("cpu").scale(made(x).square().mean())
    return loss


REFUSED = {
    carried_from_a_number: "build.. reads model.total, which the step before is to leave there",
    carried_from_nothing: "build.. reads model.hidden",
    carried_in_a_list: "build.. reads model.seen",
    a_tensor_written_in_place: "changes a tensor of shape .4,. that is no buffer",
    another_shape: r"assigns a tensor of shape \(2,\) .* to the buffer model.mean of shape \(4,\)",
    a_parameter_replaced: "puts another tensor in the place of model.weight",
    scaled: "torch.amp.GradScaler",
}


@pytest.mark.parametrize(("body", "message"), REFUSED.items())
def test_what_only_plain_pytorch_can_keep_is_refused(body: Body, message: str) -> None:
    made = model(mean=torch.zeros(4, dtype=torch.float64))
    made.plain = torch.zeros(4, dtype=torch.float64)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    names = set(vars(made))
    with pytest.raises(zg.CaptureError, match=message):
        Step(made, body)(*inputs([4]))
    no_fakes(made)
    assert set(vars(made)) == names
    assert not made.plain.any()
    torch.testing.assert_close(dict(made.state_dict()), before, rtol=0, atol=0)


def test_what_is_stored_and_read_in_one_step_is_lost_with_a_warning() -> None:
    def body(made: Any, x: Tensor) -> Tensor:
        made.penalty = made(x).square().mean()
        return made(x).mean() + made.penalty

    with pytest.warns(UserWarning, match="stores tensors in model.penalty: after the step they are not there"):
        step = as_plain_pytorch(model(), body, [4, 4])
    assert not hasattr(step.model, "penalty")


def test_what_is_collected_and_not_read_is_lost_with_a_warning() -> None:
    def body(made: Any, x: Tensor) -> Tensor:
        made.seen.append(made(x).detach())
        return made(x).square().mean()

    made: Any = model()
    made.seen = []
    with pytest.warns(UserWarning, match="stores tensors in model.seen"):
        as_plain_pytorch(made, body, [4, 4])
    assert made.seen == []


class Collecting(zg.ZeroGraph):
    """It collects a tensor in containers that are longer or nested deeper than what a trace compares."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model(), kind
        self.long: list[list[Any]] = [[0.0] for _ in range(1500)]
        self.many: set[Any] = {*range(1500)}
        self.deep: list[Any] = [0.0]
        for _ in range(9):
            self.deep = [self.deep]

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        found: Any = self.long[7] if self.kind == "long" else self.deep
        while isinstance(found[0], list):
            found = found[0]
        if self.kind == "many":
            self.many.add(loss)
        else:
            found[0] = loss
        return loss


@pytest.mark.parametrize("kind", ["long", "many", "deep"])
def test_no_tensor_of_a_trace_stays_in_long_or_nested_containers(kind: str) -> None:
    step = Collecting(kind)
    before = repr((step.long, step.deep)), {*step.many}
    with pytest.warns(UserWarning, match=f"stores tensors in self.{kind}: after the step they are not there"):
        step(*inputs([4]))
    assert (repr((step.long, step.deep)), step.many) == before


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_hooks_on_parameters_act_on_their_gradients() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()[:, None]

    def change(made: Any) -> None:
        if not hasattr(made, "hooked"):
            made.hooked = True
            made.weight.register_hook(lambda gradient: gradient * mask)
            made.bias.register_post_accumulate_grad_hook(halve)

    made = model()
    before = made.weight.detach().clone()
    step = as_plain_pytorch(made, lambda made, x: made(x).square().mean(), [4, 4, 4], change)
    assert torch.equal(step.state_dict()["modules"]["model"]["weight"][1], before[1])


def test_what_users_attach_to_a_parameter_is_there() -> None:
    def attach(made: Any) -> None:
        made.weight.scale = 2.0

    as_plain_pytorch(model(), lambda made, x: (made(x) * made.weight.scale).square().mean(), [4, 4], attach)  # type: ignore
