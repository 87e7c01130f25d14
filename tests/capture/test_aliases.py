"""Parts and views of a buffer or weight see what is written to it, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Body, Step, as_plain_pytorch, inputs, model


def halves(made: Any, x: Tensor) -> Tensor:
    first, second = made.state.unbind(0)
    new = made.state * 0.5 + 1
    loss = (made(x) - second + 2 * first).square().mean()
    made.state.copy_(new)
    return loss


def chunks(made: Any, x: Tensor) -> Tensor:
    mean, scale = made.state.chunk(2)
    loss = (made(x) - mean[0] + 2 * scale[0]).square().mean()
    made.state.mul_(0.9)
    return loss


def differences_of_rows(made: Any, x: Tensor) -> Tensor:
    made.state.copy_(made.state - made.state[:, :1])
    return (made(x) - made.state[0]).square().mean()


def differences_of_parts(made: Any, x: Tensor) -> Tensor:
    made.state.copy_(made.state - made.state.split(1)[0])
    return (made(x) - made.state[1]).square().mean()


def a_later_row(made: Any, x: Tensor) -> Tensor:
    doubled = made.state * 2
    made.state.copy_(doubled - doubled[1])
    return (made(x) - made.state[0]).square().mean()


@pytest.mark.parametrize("body", [halves, chunks, differences_of_rows, differences_of_parts, a_later_row])
def test_parts_of_a_buffer_are_read_before_it_is_written(body: Body) -> None:
    as_plain_pytorch(model(state=torch.arange(1.0, 9.0, dtype=torch.float64).view(2, 4)), body, [4, 4, 4])


def test_a_square_buffer_is_made_symmetric() -> None:
    def body(made: Any, x: Tensor) -> Tensor:
        made.state.copy_((made.state + made.state.T) / 2)
        return (made(x) @ made.state).square().mean()

    as_plain_pytorch(model(state=torch.arange(16.0, dtype=torch.float64).view(4, 4)), body, [4, 4])


@pytest.mark.parametrize("number", [0, 1])
def test_a_returned_part_of_a_weight_stays_as_it_was(number: int) -> None:
    class Returning(Step):
        def build(self, x: Tensor) -> Tensor:
            super().build(x)
            return self.model.weight.chunk(2)[number]  # type: ignore[union-attr]

    made = model()
    before = made.weight.detach().clone()  # type: ignore[operator]
    returned = Returning(made, lambda made, x: made(x).square().mean())(*inputs([4]))
    assert torch.equal(returned, before.chunk(2)[number])
