"""A custom operator with its backward in a step on several ranks: one line for each declares how it may be split.

Run it as ``python examples/custom_operator.py`` or ``torchrun --nproc-per-node 2 examples/custom_operator.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zerograph as zg


@torch.library.custom_op("example::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * x.square().mean(1, keepdim=True).add(1e-6).rsqrt() * weight


@torch.library.custom_op("example::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.square().mean(1, keepdim=True).add(1e-6).rsqrt()
    inner = grad * weight
    return scale * (inner - x * scale.square() * (inner * x).mean(1, keepdim=True)), (grad * x * scale).sum(0)


# Tracing needs shapes and dtypes.
rms_norm.register_fake(lambda x, weight: torch.empty_like(x))
rms_norm_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))


def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


rms_norm.register_autograd(lambda ctx, grad: rms_norm_backward(grad, *ctx.saved_tensors), setup_context=save)

# One letter per dimension. Rows n may be split; channels c! may not, because the mean is over them. The weight's
# gradient does not have n: if rows are split, it is a partial sum.
zg.register_rule(rms_norm, "n c!, c! -> n c!")
zg.register_rule(rms_norm_backward, "n c!, n c!, c! -> n c!, c!", linear=(0,))


class Step(zg.ZeroGraph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, bias=False)
        self.add_optimizer(torch.optim.AdamW([*self.model.parameters(), *self.norm.parameters()], lr=3e-3))
        self.set_zero_mode("distributed_split", stage=2)
        self.config.checks.on_missing_rule = "error"

    def build(self, x: Tensor) -> Tensor:
        loss = (rms_norm(self.model(x), self.norm.weight) - 1).square().mean()
        loss.backward()
        return loss


def main() -> float:
    torch.manual_seed(0)
    step = Step()
    for _ in range(10):
        x = torch.randn(16, 8)
        loss = step(x.chunk(zg.world_size())[zg.rank()])
    if zg.rank() == 0:
        print(f"loss {loss.item():.5f}", *step.inspect.collectives(), sep="\n")
    return float(loss.item())


if __name__ == "__main__":
    main()
