"""All forms of scaled dot product attention compute what plain PyTorch computes on the device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.comparison import BodyStep, train

WIDTH, HEADS = 64, 2


class Attention(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.project, self.mask = nn.Linear(WIDTH, 3 * WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.project(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
        mask = ones.tril() if self.mask == "given" else None
        attended = F.scaled_dot_product_attention(*parts.unbind(0), attn_mask=mask, is_causal=self.mask == "causal")
        return attended.float().square().mean()


def output(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


@pytest.mark.parametrize("length", [64, 192])
@pytest.mark.parametrize("mask", ["none", "causal", "given"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.long
def test_attention_is_bitwise_that_of_plain_pytorch(dtype: torch.dtype, mask: str, length: int, device: str) -> None:
    torch.manual_seed(0)
    model = Attention(mask).to(device, dtype)
    plain = copy.deepcopy(model)
    x = torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    step = BodyStep(model, torch.optim.SGD(model.parameters(), lr=0.1), body=output)
    losses = [float(step(x)) for _ in range(3)]
    assert losses == train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [x] * 3, output)
