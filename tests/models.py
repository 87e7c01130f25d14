"""The models of the suite: small, and of the kinds that users train.

None has a parameter whose gradient is zero in exact arithmetic (a bias before batch norm, the bias of attention's
keys): Adam scales the rounding noise there to full steps, and no two orders of summation agree on noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import zerograph as zg

Batch = tuple[Tensor, Tensor]


class Gpt(nn.Module):
    """A decoder-only transformer over bytes; ``tied`` shares the embedding with the head."""

    def __init__(self, tied: bool, vocabulary: int = 61, width: int = 32, layers: int = 2, context: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ConvNet(nn.Module):
    """A convolutional network with batch norm; its channels divide by no usual number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(7, 15, 3, padding=1, bias=False),
            nn.BatchNorm2d(15),
            nn.ReLU(),
        )
        self.head = nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def mlp() -> nn.Module:
    """Odd shapes: 7x15 and 15x3 divide by no number of ranks."""
    return nn.Sequential(nn.Linear(7, 15), nn.GELU(), nn.LayerNorm(15), nn.Linear(15, 3))


class TokenLoss(nn.Module):
    """Cross entropy of every position; targets of -100 do not count."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _images(generator: torch.Generator, size: int, dtype: torch.dtype) -> Batch:
    images = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 5, (size,), generator=generator)


def _vectors(generator: torch.Generator, size: int, dtype: torch.dtype) -> Batch:
    vectors = torch.randn(size, 7, generator=generator, dtype=torch.float64).to(dtype)
    return vectors, torch.randint(0, 3, (size,), generator=generator)


def _tokens(generator: torch.Generator, size: int, dtype: torch.dtype) -> Batch:
    tokens = torch.randint(0, 61, (size, 13), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "mlp": (mlp, _vectors),
    "conv": (ConvNet, _images),
    "gpt": (lambda: Gpt(tied=False), _tokens),
    "gpt_tied": (lambda: Gpt(tied=True), _tokens),
    "gpt_of_one_block": (lambda: Gpt(tied=False, layers=1), _tokens),
    "gpt_tied_of_one_block": (lambda: Gpt(tied=True, layers=1), _tokens),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of ``MODELS``, the same every time."""
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype)


def batches(name: str, count: int, size: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """``count`` whole batches of ``size`` samples, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [MODELS[name][1](generator, size, dtype) for _ in range(count)]


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a whole batch."""
    return tensor.chunk(zg.world_size())[zg.rank()]


def output_of(model: nn.Module, *batch: Tensor) -> Tensor:
    """Return the model's output, which is its loss."""
    loss: Tensor = model(*batch)
    return loss


class LossStep(zg.ZeroGraph):
    """Train a module on ``loss(model, *batch)``; ``stage`` 0 is plain data parallel."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int = 0,
        loss: Callable[..., Tensor] = output_of,
        scheduler: LRScheduler | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.add_optimizer(optimizer, scheduler)
        if stage:
            self.set_zero_mode("distributed_split", stage=stage)
        self.config.set(**options)

    def build(self, *batch: Tensor) -> Tensor:
        loss = self.loss(self.model, *batch)
        loss.backward()
        return loss


class TrainStep(LossStep):
    """The step that a user would write."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int = 0, **options: Any) -> None:
        super().__init__(model, optimizer, stage, **options)
        self.loss_fn = TokenLoss()

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def adam_step(name: str, stage: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> TrainStep:
    """Make a step that trains a model of ``MODELS`` by AdamW, the same every time."""
    model = make(name, dtype)
    return TrainStep(model, adamw(model), stage, **options)


def train_on(step: zg.ZeroGraph, data: Iterable[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train on this rank's parts of whole batches; return the losses, and the model's state."""
    losses = [step(part(x), part(y)) for x, y in data]
    return losses, step.state_dict()["modules"]["model"]


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> list[Tensor]:
    """The losses of plain PyTorch on one device, on whole batches: the expected values."""
    return [update_by(optimizer, TokenLoss()(model(x), y)) for x, y in data]


def update_by(optimizer: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> Tensor:
    """Update by the gradients of a loss alone, clipped to a norm, and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], clip)
    optimizer.step()
    return loss.detach()
