"""A training step as a fuzz draws it: model, optimizers, schedulers, data and configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zerograph as zg

Layer = tuple[str, int]
STEPS = 2


@dataclass(frozen=True)
class Drawn:
    """A model, an optimizer, what it is trained on and how.

    Attributes:
        source: what the batch is: ``"vectors"``, ``"tokens"`` or ``"images"``.
        width: features that the first layer gets; ``layers``: kinds, with how many features leave each.
        loss: how the outputs become one number.
        dtype: of parameters and of floating inputs.
        samples: of each rank, for each of the steps; more than one number where ranks differ.
        optimizers: of each optimizer its name and the hyperparameters of its groups.
        options: of the configuration; ``calls``: its methods with their arguments; ``folder`` stands for a directory.
        schedulers: by name, one for each optimizer; "" is none.
        scale: that loss scaling begins with; 0 is none.
        factor: what the loss is multiplied by, another one for each step: a ``"tensor"``, 0-d, or ``"int"``, a number.
        grid: the ranks as rows and columns; None is a line. ``same_in_rows``: of a row all ranks get the same batch.
    """

    source: str
    width: int
    layers: tuple[Layer, ...]
    loss: str
    dtype: torch.dtype
    samples: tuple[tuple[int, ...], ...]
    optimizers: tuple[tuple[str, tuple[dict[str, Any], ...]], ...]
    options: dict[str, Any] = field(default_factory=dict)
    # What is offloaded, with the arguments of zg.OffloadTo.
    offload: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: int = 2
    schedulers: tuple[str, ...] = ()
    scale: float = 0.0
    factor: str = ""
    grid: tuple[int, int] | None = None
    same_in_rows: bool = False

    @property
    def parts(self) -> int:
        """Into how many the batch is cut."""
        return self.grid[0] if self.grid is not None and self.same_in_rows else self.ranks

    def sizes(self, step: int) -> list[int]:
        """Samples of each part."""
        return [self.samples[step][part % len(self.samples[step])] for part in range(self.parts)]

    @property
    def low(self) -> bool:
        """Return True if anything is computed in less than fp32."""
        return self.options.get("amp_dtype") is not None or self.dtype is torch.bfloat16


class Model(nn.Module):
    """The layers of a :class:`Drawn`, in their order."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source = drawn.source
        width = drawn.width
        self.entry: nn.Module = nn.Identity()
        if drawn.source == "tokens":
            self.entry = nn.Embedding(11, width)
        elif drawn.source == "images":
            # Batch norm takes a bias away: its gradient would be rounding noise and nothing else.
            bias = not any(kind == "batch norm" for kind, _ in drawn.layers)
            self.entry = nn.Conv2d(2, width, 3, padding=1, bias=bias)
        self.layers = nn.ModuleList()
        for kind, out in drawn.layers:
            self.layers.append(LAYERS[kind](width, out, list(self.layers)))
            width = out if kind in ("linear", "frozen", "no bias") else width
        for layer in self.layers:
            if isinstance(layer, Frozen):
                layer.requires_grad_(False)
        self.to(drawn.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        if self.source == "images":
            x = x.mean(dim=(2, 3))
        for layer in self.layers:
            x = layer(x)
        return x


class Scale(nn.Module):
    """A 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Empty(nn.Module):
    """A parameter without elements, which has a gradient all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class Unused(nn.Module):
    """A parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Counting(nn.Module):
    """A buffer that the step writes, and one that it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.shift


class Frozen(nn.Linear):
    """Takes part, and is not trained."""


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def _tied(width: int, _: int, before: list[nn.Module]) -> nn.Module:
    """A linear layer with the weight of an earlier one of its shape."""
    made = nn.Linear(width, width)
    for one in before:
        if isinstance(one, nn.Linear) and not isinstance(one, Frozen) and one.weight.shape == made.weight.shape:
            made.weight = one.weight
    return made


LAYERS: dict[str, Callable[[int, int, list[nn.Module]], nn.Module]] = {
    "linear": lambda width, out, _: nn.Linear(width, out),
    "no bias": lambda width, out, _: nn.Linear(width, out, bias=False),
    "frozen": lambda width, out, _: Frozen(width, out),
    "tied": _tied,
    "layer norm": lambda width, *_: nn.LayerNorm(width),
    "gelu": lambda *_: nn.GELU(),
    "tanh": lambda *_: nn.Tanh(),
    "dropout 0": lambda *_: nn.Dropout(0.0),
    "residual": lambda width, *_: Residual(width),
    "0-d": lambda *_: Scale(),
    "empty": lambda *_: Empty(),
    "unused": lambda *_: Unused(),
    "buffers": lambda width, *_: Counting(width),
    "batch norm": lambda width, *_: nn.BatchNorm1d(width),
}


def _masked(out: Tensor, weights: Tensor) -> Tensor:
    mask = (weights > 0).to(out.dtype)
    return (out.square().flatten(1).mean(1) * mask).sum() / mask.sum().clamp(min=1)


def _cross_entropy(out: Tensor, weights: Tensor) -> Tensor:
    classes = (weights > 0).long().clamp(max=out.shape[-1] - 1).view(-1, *[1] * (out.dim() - 2))
    return F.cross_entropy(out.flatten(0, -2), classes.expand(out.shape[:-1]).reshape(-1))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, _: out.square().mean(),
    "sum": lambda out, _: out.square().sum() * 0.1,
    "weighted": lambda out, weights: (out.square().flatten(1).sum(1) * weights.abs()).mean(),
    "masked": _masked,
    "cross entropy": _cross_entropy,
}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "warm up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    # Of most optimizers this one sets momentum or betas, too.
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=10, cycle_momentum=bool(optimizer.defaults.keys() & {"momentum", "betas"})
    ),
}


class Step(zg.ZeroGraph):
    """The step that a user would write of it."""

    def __init__(self, drawn: Drawn, folder: str) -> None:
        super().__init__()
        self.model = Model(drawn)
        self.loss = LOSSES[drawn.loss]
        optimizers = optimizers_of(drawn, self.model)
        for optimizer, scheduler in zip(optimizers, schedulers_of(drawn, optimizers), strict=True):
            self.add_optimizer(optimizer, scheduler)
        if drawn.scale:
            self.config.precision.grad_scaler = zg.GradScaler(init_scale=drawn.scale, growth_interval=1)
        if drawn.grid is not None:
            self.config.mesh.placement = zg.placement("cpu", ranks=torch.arange(drawn.ranks).view(drawn.grid).tolist())
            if drawn.same_in_rows:
                self.config.mesh.input_sbp = (zg.sbp.split(0), zg.sbp.broadcast)
        self.config.set(**drawn.options)
        self.config.memory.offload = zg.Offload(
            **{
                part: zg.OffloadTo(**{key: folder if value == "folder" else value for key, value in to.items()})
                for part, to in drawn.offload.items()
            }
        )

    def build(self, x: Tensor, weights: Tensor, factor: Tensor | int | None = None) -> Tensor:
        loss = self.loss(self.model(x), weights)
        if factor is not None:
            loss = loss * factor
        loss.backward()
        return loss


def optimizers_of(drawn: Drawn, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Trainable parameters dealt out to the groups of the optimizers, by turns."""
    trained = [one for one in model.parameters() if one.requires_grad]
    places = sum(len(groups) for _, groups in drawn.optimizers)
    made, at = [], 0
    for name, groups in drawn.optimizers:
        given = [{**group, "params": trained[at + number :: places]} for number, group in enumerate(groups)]
        at += len(groups)
        made.append(getattr(torch.optim, name)(given))
    return made


def schedulers_of(drawn: Drawn, optimizers: list[torch.optim.Optimizer]) -> list[lr_scheduler.LRScheduler | None]:
    names = [*drawn.schedulers, *[""] * len(optimizers)]
    return [SCHEDULERS[name](one) if name else None for name, one in zip(names, optimizers, strict=False)]


def batch_of(drawn: Drawn, step: int) -> list[list[Tensor]]:
    """The inputs of each part of the batch."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for count in drawn.sizes(step):
        if drawn.source == "tokens":
            x = torch.randint(0, 11, (count, 3), generator=generator)
        elif drawn.source == "images":
            x = torch.randn(count, 2, 4, 4, generator=generator, dtype=torch.float64).to(drawn.dtype)
        else:
            x = torch.randn(count, drawn.width, generator=generator, dtype=torch.float64).to(drawn.dtype)
        weights = torch.randn(count, generator=generator, dtype=torch.float64).to(drawn.dtype)
        found.append([x, weights])
    return found


def factors_of(drawn: Drawn, step: int) -> list[Tensor | int]:
    """Return the arguments of ``build()`` beside the batch, the same on all ranks."""
    if drawn.factor == "tensor":
        return [torch.tensor(1.5 - step, dtype=drawn.dtype)]
    return [3 - step] if drawn.factor == "int" else []
