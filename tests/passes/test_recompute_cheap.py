"""``recompute_cheap``: what passes over memory compute is recomputed where that saves more than it costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep
from tests.peak_memory import most_alive_bytes

aten = torch.ops.aten


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """A norm, and two products of it that are multiplied."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


class Step(LossStep):
    def __init__(self, width: int = 512, disable: Sequence[str] = ()) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Gated(width) for _ in range(3)))
        passes = tuple(map(zg.PassEdit.disable, disable))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(model, optimizer, loss=mean_square, backend="eager", passes=passes)


def batch(width: int = 512) -> Tensor:
    return torch.randn(256, width, generator=torch.Generator().manual_seed(1))


def test_no_bit_changes_and_the_peak_falls_as_predicted() -> None:
    step, plain = Step(), Step(disable=("recompute_cheap",))
    assert [float(step(batch())) for _ in range(2)] == [float(plain(batch())) for _ in range(2)]
    saved = plain.inspect.memory.peak - step.inspect.memory.peak
    # Of each block before the last at least silu times up, in bf16.
    assert saved >= 0.9 * 2 * 256 * 2 * 512 * 2
    measured = most_alive_bytes(plain, batch()) - most_alive_bytes(step, batch())
    assert abs(measured - saved) <= 0.02 * saved


def test_a_narrow_model_saves_what_would_take_long_beside_its_products() -> None:
    step = Step(width=8)
    x = torch.randn(2**13, 8)
    step(x)
    again = [node.target for node in step.inspect.graph.graph.nodes if node.meta.get("recomputed")]
    assert aten.silu.default not in again


def test_the_input_of_two_products_is_cast_once() -> None:
    step = Step(disable=("recompute_cheap",))
    step(batch())
    casts = [
        node
        for node in step.inspect.graph.graph.find_nodes(op="call_function", target=aten._to_copy.default)
        if node.meta["origin"].phase == "forward" and node.args[0].target is aten.mul.Tensor
    ]
    assert len(casts) == 3
