"""Train a small GPT and print a hash of its losses and parameters: with virtual ranks it is one on 1 to 8 ranks.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 examples/same_bits.py              # and 2, 3, 4, 6, 8
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/same_bits.py --system ddp # and fsdp2, zerograph-off
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerograph as zg

WIDTH, HEADS, CONTEXT, VOCABULARY, SAMPLES, STEPS, SLICES = 64, 4, 32, 128, 16, 5, 8


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
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Step(zg.ZeroGraph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, slices: int | None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.set_zero_mode("distributed_split", stage=3)
        self.config.virtual_ranks = slices

    def build(self, tokens: Tensor) -> Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


def train(system: str, batches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the whole parameters."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if system.startswith("zerograph"):
        step = Step(model, optimizer, SLICES if system == "zerograph" else None)
        return [step(own) for own in batches], step.state_dict()["modules"]["model"]
    if system == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped: nn.Module = fully_shard(model, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for own in batches:
        loss = loss_of(wrapped, own)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean / dist.get_world_size())
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    return losses, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("zerograph", "zerograph-off", "ddp", "fsdp2"), default="zerograph")
    system = parser.parse_args().system
    if not system.startswith("zerograph"):
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = torch.randint(VOCABULARY, (STEPS, SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    own = torch.arange(SLICES).tensor_split(zg.world_size())[zg.rank()]
    losses, state = train(system, [batch.unflatten(0, (SLICES, -1))[own].flatten(0, 1) for batch in whole])
    tensors = [*losses, *(state[name] for name in sorted(state))]
    digest = hashlib.sha256(b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors)).hexdigest()
    if zg.rank() == 0:
        print(f"{system}, {zg.world_size()} rank(s): loss {losses[-1].item():.7f}, hash {digest[:12]}")
    if not system.startswith("zerograph"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
