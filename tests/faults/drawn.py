"""Training steps drawn from a small grammar, and what becomes of one: the numbers of one device, or an error."""

from __future__ import annotations

import functools
import math
import traceback
import warnings
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
# Relative, where gradients are reduced in less than fp32.
REDUCED = 0.05


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
    calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = ()
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
        """Whether anything is computed in less than fp32."""
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
            self.config.grad_scaler = zg.GradScaler(init_scale=drawn.scale, growth_interval=1)
        if drawn.grid is not None:
            self.config.placement = zg.placement("cpu", ranks=torch.arange(drawn.ranks).view(drawn.grid).tolist())
            if drawn.same_in_rows:
                self.config.batch_sbp = (zg.sbp.split(0), zg.sbp.broadcast)
        for name, value in drawn.options.items():
            setattr(self.config, name, value)
        for name, args, kwargs in drawn.calls:
            filled = {key: folder if value == "folder" else value for key, value in kwargs.items()}
            getattr(self.config, name)(*args, **filled)

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
    """What ``build()`` gets beside the batch, the same on all ranks."""
    if drawn.factor == "tensor":
        return [torch.tensor(1.5 - step, dtype=drawn.dtype)]
    return [3 - step] if drawn.factor == "int" else []


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
                # Of a grid whose rows get the same, the columns are counted first.
                part = batch_of(drawn, number)[zg.rank() * drawn.parts // drawn.ranks]
                found = step(*part, *factors_of(drawn, number))
                losses.append(found.mean() if drawn.options.get("accumulation_outputs") == "packed" else found)
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
    """What one device computes: losses, the model's state before and after, the optimizers', the schedulers'.

    ``furthest`` is how far a single number of a trained parameter moved, at most.
    """

    losses: list[Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any] | None]
    furthest: float


def plainly(drawn: Drawn) -> Plain:
    """Plain PyTorch on the whole batch."""
    model = Model(drawn)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = optimizers_of(drawn, model)
    schedulers = schedulers_of(drawn, optimizers)
    amp, losses = drawn.options.get("amp_dtype"), []
    scaler = torch.amp.GradScaler("cpu", init_scale=drawn.scale or 1.0, growth_interval=1, enabled=bool(drawn.scale))
    for number in range(STEPS):
        x, weights = (torch.cat(parts) for parts in zip(*batch_of(drawn, number), strict=True))
        if drawn.options.get("batch_norm") == "local":
            norm_parts(model, drawn, number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
            loss = LOSSES[drawn.loss](model(x), weights)
            for factor in factors_of(drawn, number):
                loss = loss * factor
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if (norm := drawn.options.get("clip_grad_norm")) is not None:
            trained = [one for made in optimizers for group in made.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(trained, norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in filter(None, schedulers):
            scheduler.step()
        losses.append(loss.detach())
    after = model.state_dict()
    furthest = max(
        (float((one.detach() - before[name]).abs().max()) for name, one in model.named_parameters() if one.numel()),
        default=0.0,
    )
    states = [one.state_dict() for one in optimizers]
    moved = furthest if math.isfinite(furthest) else 0.0
    return Plain(losses, before, after, states, [one and one.state_dict() for one in schedulers], moved)


def norm_parts(model: Model, drawn: Drawn, step: int) -> None:
    """Let batch norm take the statistics of each rank's micro-batches, and their mean for the running ones."""
    micro = drawn.options.get("gradient_accumulation_steps", 1)
    sizes = [size // micro for size in drawn.sizes(step) for _ in range(micro)]

    def forward(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        means, variances = norm.running_mean, norm.running_var
        assert means is not None
        assert variances is not None
        ways = [(means.clone(), variances.clone()) for _ in sizes]
        parts = [
            F.batch_norm(part, *way, norm.weight, norm.bias, training=True, momentum=norm.momentum or 0.0, eps=norm.eps)
            for part, way in zip(x.split(sizes), ways, strict=True)
        ]
        for held, found in zip((means, variances), zip(*ways, strict=True), strict=True):
            held.copy_(torch.stack(found).mean(0))
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked += 1
        return torch.cat(parts)

    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.forward = functools.partial(forward, module)


def differences(drawn: Drawn, plain: Plain, losses: list[Tensor], state: dict[str, Any]) -> str:
    """What differs by more than rounding; empty if nothing does.

    Parameters are compared by how far they moved: an update that is twice too long must not pass for rounding. Some
    move by nothing else, where what is summed nearly cancels: within a few roundings of the furthest move all is right.
    """
    limit = tolerance(drawn)
    low = drawn.low or limit == REDUCED
    rounding = 4 * torch.finfo(torch.bfloat16 if low else drawn.dtype).eps
    for number, (mine, theirs) in enumerate(zip(losses, plain.losses, strict=True)):
        if mine.dtype != theirs.dtype and drawn.options.get("amp_dtype") is None:
            return f"the loss of step {number} is {mine.dtype}, on one device {theirs.dtype}"
        if not close(mine, theirs, theirs, limit):
            return f"the loss of step {number} is {mine.item()}, on one device {theirs.item()}"
    model = state["modules"]["model"]
    if list(model) != list(plain.after):
        return f"the state has {list(model)}, on one device {list(plain.after)}"
    for name, theirs in plain.after.items():
        if not close(model[name], theirs, theirs - plain.before[name], limit, theirs, rounding * plain.furthest):
            moved = (theirs - plain.before[name]).flatten()[:4].tolist()
            return (
                f"{name} is {model[name].flatten()[:4].tolist()}, on one device {theirs.flatten()[:4].tolist()}, "
                f"which moved by {moved}"
            )
    for number, theirs in enumerate(plain.optimizers):
        found = of_optimizer(state["optimizers"][number], theirs, limit, rounding)
        if found:
            return f"optimizer {number}: {found}"
    for number, (held, theirs) in enumerate(zip(state["lr_schedulers"], plain.schedulers, strict=True)):
        if theirs is not None and any(held[key] != theirs[key] for key in ("last_epoch", "_last_lr")):
            return f"scheduler {number} is {held}, on one device {theirs}"
    return ""


def of_optimizer(mine: dict[str, Any], theirs: dict[str, Any], limit: float, rounding: float) -> str:
    """What differs; entries may be nothing but ``rounding``, relative, of the largest of their name."""
    noise = dict.fromkeys([name for entries in theirs["state"].values() for name in entries], 0.0)
    for entries in theirs["state"].values():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.numel() and name != "step":
                noise[name] = max(noise[name], rounding * float(value.abs().nan_to_num(0.0, 0.0).max()))
    # What has not been trained has no state on one device, and zeros of it here.
    for number, entries in theirs["state"].items():
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                continue
            if number not in mine["state"] or name not in mine["state"][number]:
                return f"no {name} of parameter {number}: {mine['state'].get(number, {}).keys()}"
            if not close(mine["state"][number][name], value, value, limit * 10, noise=noise[name]):
                return f"{name} of parameter {number} is {mine['state'][number][name]}, on one device {value}"
    for at, (a, b) in enumerate(zip(mine["param_groups"], theirs["param_groups"], strict=True)):
        for key, value in b.items():
            # What tells kernels apart, and no numbers.
            if key not in ("foreach", "fused", "capturable", "differentiable") and a.get(key) != value:
                return f"group {at} has {key} = {a.get(key)!r}, on one device {value!r}"
    return ""


def close(
    mine: Tensor, theirs: Tensor, moved: Tensor, limit: float, scale: Tensor | None = None, noise: float = 0.0
) -> bool:
    """Within ``limit`` of how far it moved, a few roundings of what it is, and ``noise`` of each of its numbers.

    What is no number must be none.
    """
    if mine.shape != theirs.shape:
        return False
    dtype = theirs.dtype
    mine, theirs, moved = (one.detach().double().flatten() for one in (mine, theirs, moved))
    if not torch.equal(torch.isfinite(mine), torch.isfinite(theirs)):
        return False
    keep = torch.isfinite(theirs)
    moved = torch.where(torch.isfinite(moved), moved, 0.0)
    rounding = noise * math.sqrt(theirs.numel())
    if scale is not None and scale.dtype.is_floating_point and keep.any():
        rounding += 4 * torch.finfo(scale.dtype).eps * float(theirs[keep].norm())
    # Sums of numbers that are about as large as 1.
    rounding += 5e-7 if dtype is torch.float32 else 1e-14
    return float((mine - theirs)[keep].norm()) <= limit * float(moved.norm()) + rounding


def tolerance(drawn: Drawn) -> float:
    if drawn.low:
        return 0.15
    reduced = drawn.options.get("reduce_dtype")
    if reduced in (torch.bfloat16, torch.float16) and drawn.dtype is not torch.float64:
        return REDUCED
    return 2e-3 if drawn.dtype is torch.float32 else 1e-6
