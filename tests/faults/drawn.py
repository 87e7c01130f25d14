"""Training steps drawn from a small grammar, and what becomes of one: the numbers of one device, or an error."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """

    source: str
    width: int
    layers: tuple[Layer, ...]
    loss: str
    dtype: torch.dtype
    samples: tuple[tuple[int, ...], ...]
    optimizers: tuple[tuple[str, tuple[dict[str, Any], ...]], ...]
    options: dict[str, Any] = field(default_factory=dict)
    calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = ()
    ranks: int = 2


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


class Step(zg.ZeroGraph):
    """The step that a user would write of it."""

    def __init__(self, drawn: Drawn, folder: str) -> None:
        super().__init__()
        self.model = Model(drawn)
        self.loss = LOSSES[drawn.loss]
        for optimizer in optimizers_of(drawn, self.model):
            self.add_optimizer(optimizer)
        for name, value in drawn.options.items():
            setattr(self.config, name, value)
        for name, args, kwargs in drawn.calls:
            filled = {key: folder if value == "folder" else value for key, value in kwargs.items()}
            getattr(self.config, name)(*args, **filled)

    def build(self, x: Tensor, weights: Tensor) -> Tensor:
        loss = self.loss(self.model(x), weights)
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


def batch_of(drawn: Drawn, step: int) -> list[list[Tensor]]:
    """The inputs of each rank."""
    generator = torch.Generator().manual_seed(step)
    samples = drawn.samples[step]
    found = []
    for rank in range(drawn.ranks):
        count = samples[rank % len(samples)]
        if drawn.source == "tokens":
            x = torch.randint(0, 11, (count, 3), generator=generator)
        elif drawn.source == "images":
            x = torch.randn(count, 2, 4, 4, generator=generator, dtype=torch.float64).to(drawn.dtype)
        else:
            x = torch.randn(count, drawn.width, generator=generator, dtype=torch.float64).to(drawn.dtype)
        weights = torch.randn(count, generator=generator, dtype=torch.float64).to(drawn.dtype)
        found.append([x, weights])
    return found


@dataclass
class Outcome:
    """``kind``: ``"equal"``, ``"refused"`` (a ZeroGraphError), ``"alike"`` (torch's own error, also on one device), or
    ``"wrong"``; ``said`` is the message, or what is wrong."""

    kind: str
    said: str = ""


def tried(drawn: Drawn, folder: str) -> Outcome:
    """Run it as this rank, and compare with one device."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Plain | str
        try:
            plain = plainly(drawn)
        except Exception as error:
            plain = f"{type(error).__name__}: {error}"
        step: Step | None = None
        losses: list[Tensor] = []
        try:
            step = Step(drawn, folder)
            for number in range(STEPS):
                losses.append(step(*batch_of(drawn, number)[zg.rank()]))
            state = step.state_dict()
        except zg.VerificationError:
            return Outcome("wrong", traceback.format_exc())
        except zg.ZeroGraphError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            if isinstance(plain, str) and plain.startswith(type(error).__name__):
                return Outcome("alike", plain)
            return Outcome("wrong", traceback.format_exc())
        if isinstance(plain, str):
            return Outcome("wrong", f"it ran, where one device says {plain}")
        told = differences(drawn, plain, losses, state)
        return Outcome("wrong", told) if told else Outcome("equal")


@dataclass
class Plain:
    """What one device computes: losses, the model's state before and after, and the optimizers'."""

    losses: list[Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    optimizers: list[dict[str, Any]]


def plainly(drawn: Drawn) -> Plain:
    """Plain PyTorch on the whole batch."""
    model = Model(drawn)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = optimizers_of(drawn, model)
    amp, losses = drawn.options.get("amp_dtype"), []
    for number in range(STEPS):
        x, weights = (torch.cat(parts) for parts in zip(*batch_of(drawn, number), strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
            loss = LOSSES[drawn.loss](model(x), weights)
        loss.backward()
        if (norm := drawn.options.get("clip_grad_norm")) is not None:
            trained = [one for made in optimizers for group in made.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(trained, norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return Plain(losses, before, model.state_dict(), [one.state_dict() for one in optimizers])


def differences(drawn: Drawn, plain: Plain, losses: list[Tensor], state: dict[str, Any]) -> str:
    """What differs by more than rounding; empty if nothing does.

    Parameters are compared by how far they moved: an update that is twice too long must not pass for rounding.
    """
    limit = tolerance(drawn)
    for number, (mine, theirs) in enumerate(zip(losses, plain.losses, strict=True)):
        if mine.dtype != theirs.dtype and drawn.options.get("amp_dtype") is None:
            return f"the loss of step {number} is {mine.dtype}, on one device {theirs.dtype}"
        if not close(mine, theirs, theirs, limit):
            return f"the loss of step {number} is {mine.item()}, on one device {theirs.item()}"
    model = state["modules"]["model"]
    if list(model) != list(plain.after):
        return f"the state has {list(model)}, on one device {list(plain.after)}"
    for name, theirs in plain.after.items():
        if not close(model[name], theirs, theirs - plain.before[name], limit, theirs):
            moved = (theirs - plain.before[name]).flatten()[:4].tolist()
            return (
                f"{name} is {model[name].flatten()[:4].tolist()}, on one device {theirs.flatten()[:4].tolist()}, "
                f"which moved by {moved}"
            )
    for number, theirs in enumerate(plain.optimizers):
        found = of_optimizer(drawn, state["optimizers"][number], theirs, limit)
        if found:
            return f"optimizer {number}: {found}"
    return ""


def of_optimizer(drawn: Drawn, mine: dict[str, Any], theirs: dict[str, Any], limit: float) -> str:
    # What has not been trained has no state on one device, and zeros of it here.
    for number, entries in theirs["state"].items():
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                continue
            if number not in mine["state"] or name not in mine["state"][number]:
                return f"no {name} of parameter {number}: {mine['state'].get(number, {}).keys()}"
            if not close(mine["state"][number][name], value, value, limit * 10):
                return f"{name} of parameter {number} is {mine['state'][number][name]}, on one device {value}"
    for at, (a, b) in enumerate(zip(mine["param_groups"], theirs["param_groups"], strict=True)):
        for key, value in b.items():
            # What tells kernels apart, and no numbers.
            if key not in ("foreach", "fused", "capturable", "differentiable") and a.get(key) != value:
                return f"group {at} has {key} = {a.get(key)!r}, on one device {value!r}"
    return ""


def close(mine: Tensor, theirs: Tensor, moved: Tensor, limit: float, scale: Tensor | None = None) -> bool:
    """Within ``limit`` of how far it moved, and a few roundings of what it is; what is no number must be none."""
    if mine.shape != theirs.shape:
        return False
    mine, theirs, moved = (one.detach().double().flatten() for one in (mine, theirs, moved))
    if not torch.equal(torch.isfinite(mine), torch.isfinite(theirs)):
        return False
    keep = torch.isfinite(theirs)
    moved = torch.where(torch.isfinite(moved), moved, 0.0)
    rounding = 0.0
    if scale is not None and scale.dtype.is_floating_point and keep.any():
        rounding = 4 * torch.finfo(scale.dtype).eps * float(theirs[keep].norm())
    return float((mine - theirs)[keep].norm()) <= limit * float(moved.norm()) + rounding + 1e-14


def tolerance(drawn: Drawn) -> float:
    if drawn.options.get("amp_dtype") is not None or drawn.dtype is torch.bfloat16:
        return 0.15
    reduced = drawn.options.get("reduce_dtype")
    if reduced in (torch.bfloat16, torch.float16) and drawn.dtype is not torch.float64:
        return 0.05
    return 2e-3 if drawn.dtype is torch.float32 else 1e-6
