"""A GPT of 1.3 billion parameters to plan and look at; it is not trained, and takes no memory.

zerograph plan examples/plan_gpt.py:example --world-size 64 --device h100          # the fastest stage that fits
zerograph inspect examples/plan_gpt.py:example --world-size 64 --report gpt.html   # the step on one page
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 2048, 24, 16, 2048, 50304
SAMPLES = 2  # of each rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class TrainStep(zg.ZeroGraph):
    def __init__(self) -> None:
        super().__init__()
        self.model = Gpt()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True))
        self.config.enable_amp(dtype=torch.bfloat16)

    def build(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss


def example() -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    """The step, and one rank's part of a batch."""
    with torch.device("meta"):
        tokens = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
        return TrainStep(), (tokens, tokens)
