"""Run a drawn training step and judge it: it has the numbers of one device, or an error."""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.faults.random_steps import (
    LOSSES,
    STEPS,
    Drawn,
    Model,
    Step,
    batch_of,
    factors_of,
    optimizers_of,
    schedulers_of,
)

# Relative, where gradients are reduced in less than fp32.
REDUCED = 0.05


@dataclass
class Outcome:
    """``kind``: ``"equal"``, ``"refused"`` (a ZeroGraphError), ``"alike"`` (torch's own error, also on one device), or
    ``"wrong"``; ``said`` is the message, or what is wrong."""

    kind: str
    said: str = ""


def tried(drawn: Drawn, folder: str) -> Outcome:
    """Run it as this rank, and compare with one device."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
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
    """The run on one device: losses, the model's state before and after, the optimizers', the schedulers'.

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
    """Return the first difference beyond rounding as text; empty if there is none.

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
    """Return the first difference; an entry may be off by ``rounding`` times the largest entry of its name."""
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
