"""A small step that `calibrate` runs and predicts, to measure how operators slow each other down."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerograph.graph import ZeroGraph
from zerograph.runtime.job.process_group import rank

_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _CONTEXT, _BATCH = 2, 256, 4, 4096, 128, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        widened: Tensor = F.gelu(self.up(self.norm2(mixed)))
        following: Tensor = mixed + self.down(widened)
        return following


class Probe(ZeroGraph):
    """Two transformer layers with an embedding and a head, updated by AdamW."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(_VOCABULARY, _WIDTH),
            *(_Block() for _ in range(_LAYERS)),
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, _VOCABULARY, bias=False),
        ).to(device)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Compute the loss of the next tokens, and its gradients."""
        loss = F.cross_entropy(self.model(tokens).flatten(0, -2), following.flatten())
        loss.backward()
        return loss


def started(device: torch.device) -> tuple[Probe, tuple[Tensor, Tensor]]:
    """Return the step after two updates (the second may be another program), and a rank's batch."""
    step = Probe(device)
    # Generators of ranks may be equal; rows are not.
    tokens, following = (torch.randint(_VOCABULARY, (2, _BATCH, _CONTEXT), device=device) + rank()) % _VOCABULARY
    for _ in range(2):
        step(tokens, following)
    return step, (tokens, following)
