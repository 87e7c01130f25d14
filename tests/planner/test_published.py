"""Plans beside tokens per second that others published: Llama 3.1 8B as torchtitan trained it with FSDP2 in bf16.

Rows of torchtitan's docs/performance.md (64 A100 of 80 GB, one sequence of 8192 tokens a rank, commit 0413364) and of
benchmarks/llama3_h100_202412_torchtitan.md (8 and 128 H100, two sequences a rank, with torch.compile, as plans assume;
commit 31a17bf). Its selective checkpointing recomputes every other layer, as torch's own checkpoint does here; the rows
of "selective op" recompute every other product, which is nearly as much.

All layers but the first and last are alike: a step's time is that of a few layers, and as much for each further one.
The long form compiles all 32.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerograph as zg
from tests.harness import sliced

LAYERS, WIDTH, HEADS, GROUPS, INNER, VOCABULARY, CONTEXT = 32, 4096, 32, 8, 14336, 128256, 8192
# Of published tokens per second.
TOLERANCE = 0.25
ROWS = [
    pytest.param("a100", 64, 1, 2904, id="64-a100-selective-layer"),
    pytest.param("a100", 64, 1, 2973, id="64-a100-selective-op"),
    pytest.param("h100", 8, 2, 6667, id="8-h100"),
    pytest.param("h100", 128, 2, 6514, id="128-h100"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = linear(WIDTH, WIDTH // HEADS * GROUPS), linear(WIDTH, WIDTH // HEADS * GROUPS)
        self.gate, self.up, self.down = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (rotated(k, cos, sin), v))
        attended = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Llama(zg.ZeroGraph):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "table": nn.Embedding(VOCABULARY, WIDTH),
                "blocks": nn.ModuleList(Block() for _ in range(layers)),
                "norm": nn.RMSNorm(WIDTH),
                "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
            }
        )
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True))
        self.config.enable_amp(dtype=torch.bfloat16)

    def build(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.model["table"](tokens)
        half = torch.arange(0, WIDTH // HEADS, 2, device=tokens.device) / (WIDTH // HEADS)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).float(), 500000.0**-half)
        cos, sin = angles.cos(), angles.sin()
        for place, block in enumerate(self.model["blocks"]):
            again = place % 2 == 0
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if again else block(x, cos, sin)
        logits = self.model["head"](self.model["norm"](x)).flatten(0, 1).float()
        loss = F.cross_entropy(logits, following.flatten())
        loss.backward()
        return loss


@functools.cache
def plan(layers: int, device: str, ranks: int, sequences: int) -> zg.Plan:
    with torch.device("meta"):
        step, tokens = Llama(layers), torch.zeros(sequences, CONTEXT, dtype=torch.long)
    return zg.plan(step, (tokens, tokens), world_size=ranks, stage=3, device=device)


@sliced("device, ranks, sequences, published", ROWS[:1], ROWS[1:])
def test_a_few_layers_lead_to_what_was_published(device: str, ranks: int, sequences: int, published: int) -> None:
    few, more = (plan(layers, device, ranks, sequences) for layers in (2, 4))
    each = (more.time.seconds - few.time.seconds) / 2
    seconds = few.time.seconds + (LAYERS - 2) * each
    assert sequences * CONTEXT / seconds == pytest.approx(published, rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(("device", "ranks", "sequences", "published"), ROWS)
def test_all_layers_are_as_fast_as_published(device: str, ranks: int, sequences: int, published: int) -> None:
    found = plan(LAYERS, device, ranks, sequences)
    assert found.parameters == pytest.approx(8.03e9, rel=0.001)
    assert found.tokens_per_second == pytest.approx(published, rel=TOLERANCE)
    assert found.precision == "bf16 with fp32 masters"
