"""A prepared loop on two ranks computes what plain PyTorch computes in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

import zerograph as zg
from tests.harness import in_turn, sliced
from tests.loops import scripts
from tests.loops.scripts import (
    Prepare,
    Seen,
    assert_like_one_process,
    prepare_at,
    samples,
    seeded,
    unprepared,
)
from tests.pool import Pool, RanksError


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Any]


def loop_of(prepare: Prepare, step: Step, model: Callable[[], nn.Module], rows: int, last: int) -> Seen:
    """Train by a step for each batch, the last of a pass with so many rows; return what it returned, and the state."""
    module = seeded(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    loader = DataLoader(samples(2 * rows + last, 6), batch_size=rows, shuffle=True)
    module, optimizer, loader = prepare(module, optimizer, loader)
    printed = []
    torch.manual_seed(3)
    for _ in range(2):
        for x, y in loader:
            printed.append(float(step(module, optimizer, x, y)))
    return printed, [dict(module.state_dict())]


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def share_of_the_batch(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    losses = F.cross_entropy(model(x), y, reduction="none")
    hardest = losses.topk(int(0.7 * len(x))).values
    return update(optimizer, hardest.sum() / len(hardest)).item()


def two_views(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    first, second = F.normalize(model(torch.cat([x, x * 0.9])), dim=1).chunk(2)
    similar = first @ second.T / 0.5
    return update(optimizer, F.cross_entropy(similar, torch.arange(len(x)))).item()


def noise_of_the_loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    noise = torch.randn(len(x), 6, dtype=x.dtype)
    return update(optimizer, F.cross_entropy(model(x + 0.1 * noise), y) + model(noise).square().mean()).item()


def edited_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        for one in model.parameters():
            one.grad.mul_(1 / (1 + norm)).add_(one, alpha=0.01)
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return total.item()


def gradients_that_are_left(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    """Add up the gradients of all steps, clipped."""
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm.item()


def several_losses(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    optimizer.zero_grad()
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()
    for part, label in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(model(part), label) / 2).backward()
    optimizer.step()
    return (out.argmax(1) == y).sum().item()


def gradient_penalty(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    x.requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return update(optimizer, F.cross_entropy(out, y) + (gradient.norm(dim=1) - 1).square().mean()).item()


def branch_on_a_value(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    if loss.item() > 1.4:
        loss = loss * 2
    chosen = x[y > 1]
    return update(optimizer, loss + model(chosen).pow(2).mean() if len(chosen) else loss).item()


def penalty_on_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    penalty = sum(one.abs().sum() for one in model.parameters())
    return update(optimizer, F.cross_entropy(model[2](torch.relu(model[0](x))), y) + 0.01 * penalty).item()


def submodules(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    # The first operator with a parameter since the update has a global tensor before it.
    return update(optimizer, F.cross_entropy(model[2](torch.relu(model[0](x))), y)).item()


def clipped_weights(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    model(x)
    # No version counts this.
    for one in model.parameters():
        one.data.clamp_(-0.2, 0.2)
    return loss.item()


def assigned_values(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    before = [one.data.clone() for one in model.parameters()]
    loss = update(optimizer, F.cross_entropy(model(x), y))
    for one, value in zip(model.parameters(), before, strict=True):
        # The gradient is a global tensor.
        one.data = 0.9 * one.data + 0.1 * value - 0.01 * one.grad.data
    return loss.item()


def averages_for_a_while(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    weights = {name: one.data if "weight" in name else one.detach() for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        # What was read stays as it was.
        one.data = 0.5 * weights[name]
    with torch.no_grad():
        result = model(x).square().sum().item()
    for name, one in model.named_parameters():
        one.data = weights[name]
    first, last = model[0].bias, model[2].bias
    first.data[:4], last.data = last.data, first.data[:4].clone()
    return loss.item() + result


def state_of_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    total = sum(one["exp_avg_sq"].sum().item() for one in optimizer.state.values())
    steps = float(optimizer.state[model[0].weight]["step"])
    if steps == 1:
        for one in optimizer.state.values():
            one["exp_avg"].mul_(0.5)
    elif steps == 2:
        optimizer.state[model[0].weight]["exp_avg"] = model[0].weight.grad * 0.1
    elif steps == 3:
        del optimizer.state[model[2].bias]
    elif steps == 4:
        optimizer.state = defaultdict(dict)
        total += model(x).sum().item()
    return loss.item() + total + len(optimizer.state)


def kept_state(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    weight = model[0].weight
    kept = vars(optimizer).setdefault("kept", optimizer.state[weight])
    steps = float(kept["step"])
    kept["exp_avg"].mul_(0.5)
    kept["exp_avg_sq"] = kept["exp_avg_sq"] * 0.9
    if steps == 3:
        optimizer.state[weight] = optimizer.state.pop(weight)
    return loss.item() + steps + len(kept) + kept.get("exp_avg").sum().item()


def hooks_of_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    calls: list[float] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        calls.append(sum(one.sum().item() for one in gradients))
        for one in gradients:
            one.clamp_(-0.01, 0.01)

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: calls.append(1.0))]
    loss = update(optimizer, F.cross_entropy(model(x), y))
    optimizer.zero_grad()
    optimizer.step()
    for hook in hooks:
        hook.remove()
    assert len(calls) == 4
    return loss.item() + sum(calls)


def attack(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        F.cross_entropy(model(x + delta), y).backward()
        delta.data = (delta + 0.1 * delta.grad.detach().sign()).clamp(-0.1, 0.1)
        delta.grad.zero_()
    return update(optimizer, F.cross_entropy(model(x + delta.detach()), y)).item()


def gradients_of_samples(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss_of(values: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (sample[None],)), label[None])

    optimizer.zero_grad()
    gradients = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
    for name, one in model.named_parameters():
        one.grad = gradients[name].clamp(-0.5, 0.5).mean(0)
    optimizer.step()
    _, directional = torch.func.jvp(lambda x: model(x).square().sum(0), (x,), (torch.ones_like(x),))
    # A list of tensors becomes one of numbers.
    largest = torch.tensor([gradients[name].abs().max() for name in parameters])
    return largest.sum().item() + directional.detach().square().sum().item()


def inner_steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    """Learn to learn, as MAML: weights that were updated inside of the loss take the place of the parameters."""
    values: dict[str, Tensor] = dict(model.named_parameters())
    for _ in range(2):
        inner = F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)
        gradients = torch.autograd.grad(inner, list(values.values()), create_graph=True)
        values = {name: one - 0.1 * g for (name, one), g in zip(values.items(), gradients, strict=True)}
    return update(optimizer, F.cross_entropy(torch.func.functional_call(model, values, (-x,)), y)).item()


def changed_state(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    # As averages of models do. No version counts the second.
    for one in model.state_dict().values():
        one.mul_(0.9)
        one.data.mul_(0.9)
    return loss.item()


def assigned_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    # The parameters are a generator.
    gradients = torch.autograd.grad(loss, model.parameters())  # type: ignore[arg-type]
    for one, gradient in zip(model.parameters(), gradients, strict=True):
        one.grad = gradient
    optimizer.step()
    return loss.item()


class Scaled(nn.Module):
    """It returns a parameter, as models of images and texts return their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = perceptron(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.scale


class Passing(nn.Module):
    """It returns its input, a view of it, and a buffer, in a dict whose entries are attributes."""

    class Result(dict[str, Any]):
        """Such a dict."""

        __getattr__ = dict.__getitem__

    def __init__(self, has_view: bool) -> None:
        super().__init__()
        self.net, self.has_view = perceptron(), has_view
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        view = x[:, 1] if self.has_view else None
        return Passing.Result(logits=self.net(x), x=x, calls=self.calls, view=view)


def returned_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = update(optimizer, F.cross_entropy(out.logits, y))
    model(x)
    out.x.mul_(2)
    if out.view is not None:
        out.view.zero_()
    assert out.x is x
    return loss.item() + x.square().sum().item() + out.calls.item()


def added_layers(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    if len(model) == 3 and optimizer.state:  # type: ignore[arg-type]
        model.append(seeded(lambda: nn.Linear(4, 4)))  # type: ignore[operator]
        optimizer.add_param_group({"params": model[3].parameters()})  # type: ignore[index]
    return update(optimizer, F.cross_entropy(model(x), y)).item()


def removed_layers(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    """The optimizer keeps the parameters of a layer that is there again later, and two of no module."""
    if not hasattr(model, "scale"):
        model.__dict__["scale"] = scale = nn.Parameter(torch.ones((), dtype=x.dtype))
        optimizer.add_param_group({"params": [scale], "weight_decay": 0.0})
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3, dtype=x.dtype)))
    losses = [update(optimizer, F.cross_entropy(model(x) * model.scale, y))]
    optimizer.zero_grad()
    last = model[2]
    del model[2]
    losses.append(update(optimizer, F.cross_entropy(model(x) * model.scale, y)))
    losses.append(update(optimizer, F.cross_entropy(model(x), y)))
    model.append(last)
    return sum(loss.item() for loss in losses)


def replaced_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    old, group = model[2].weight, optimizer.param_groups[0]  # type: ignore[index]
    model[2].weight = new = nn.Parameter(old.detach() * 0.5)  # type: ignore[index, operator, union-attr]
    group["params"] = [new if one is old else one for one in group["params"]]
    optimizer.state[new] = optimizer.state.pop(old)
    update(optimizer, F.cross_entropy(model(x), y))
    return loss.item() + model[2](model[0](x)).square().mean().item()  # type: ignore[index, operator]


def returned_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    out, scale = model(x)
    loss = update(optimizer, F.cross_entropy(out * scale, y))
    return loss.item() + scale.item()


class Changing(nn.Module):
    """It changes its arguments: a list, or else the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        out: Tensor = self.net(x if kept is not None else x.mul_(0.5))
        if kept is not None:
            kept.append(out)
        return out


def changed_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    kept: list[Tensor] = []
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x, kept), y) + x.mean()
    return update(optimizer, loss + sum(one.square().mean() for one in kept)).item()


_KINDS = ("array", "set", "list", "iterator")


class Keeping(nn.Module):
    """Each call changes an array, a set, tensors in a list, and an iterator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = perceptron(), kind
        self.seen, self.ids, self.means = numpy.zeros(2000), {0}, [torch.zeros(4).double()]
        self.factors = itertools.cycle([0.5, 1.0, 1.5])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.kind == "array":
            self.seen[0] += 1
        elif self.kind == "set":
            self.ids.add(len(self.ids))
        elif self.kind == "list":
            self.means[0] = 0.5 * self.means[0] + out.detach().mean(0)
        else:
            out = out * next(self.factors)
        return out


def kept_by_calls(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    return loss.item() + model.seen[0] + len(model.ids) + model.means[0].sum().item()  # type: ignore[index, arg-type]


@functools.lru_cache
def ramp(rows: int) -> Tensor:
    return torch.linspace(0.5, 1, rows).double()[:, None]


_FILES: list[Any] = []


class Writing(nn.Module):
    """Each call prints, logs, counts in a table of its own, and asks a cache; it reads an attribute by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.logger, self.kind = perceptron(), logging.Logger("calls"), "none"
        self.calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.options = SimpleNamespace(factor_0=1.0, factor_1=1.0)
        _FILES.append(tempfile.NamedTemporaryFile("r"))  # noqa: SIM115
        # Each rank has its own.
        self.paths = [_FILES[-1].name]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "print":
            print("a call of", len(x))
        elif self.kind == "log":
            self.logger.warning("a call")
        elif self.kind == "warning":
            warnings.warn("a call", stacklevel=1)
        elif self.kind == "file":
            with open(self.paths[0], "a") as file:
                file.write("a call")
        elif self.kind == "table":
            self.calls[self] = self.calls.get(self, 0) + 1
        number = self.net[0].in_features - 5
        return self.net(x) * ramp(len(x)) * getattr(self.options, f"factor_{number}")  # type: ignore[no-any-return]


def written_by_calls(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    model.kind, written = kind, io.StringIO()
    handler = logging.StreamHandler(written)
    model.logger.addHandler(handler)  # type: ignore[operator, union-attr]
    with contextlib.redirect_stdout(written), warnings.catch_warnings(record=True, action="always") as shown:
        loss = update(optimizer, F.cross_entropy(model(x), y))
    written.write(_FILES[-1].read() + "".join("a call" for one in shown if str(one.message) == "a call"))
    model.logger.removeHandler(handler)  # type: ignore[operator, union-attr]
    model.options.factor_1 = 1.0 + len(y) % 3  # type: ignore[union-attr, assignment]
    return loss.item() + 10 * len(written.getvalue()) + model.calls.get(model, 0)  # type: ignore[operator, union-attr]


class Weighted(nn.Module):
    """Its factors are tensors in a list and in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factors = perceptron(), [torch.ones(4).double()]
        self.options = SimpleNamespace(factor=torch.ones(4).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.factors[0] * self.options.factor  # type: ignore[no-any-return]


def wrapped_layers(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    if isinstance(model[2], nn.Linear) and loss < 1.5:  # type: ignore[index]
        # Its parameters have other names then.
        model[2] = nn.Sequential(model[2], nn.Tanh())  # type: ignore[index, operator]
    return loss.item()


def replaced_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    model.factors[0] = model.factors[0] * 1.1  # type: ignore[index, operator]
    model.options.factor = model.options.factor * 0.8  # type: ignore[assignment, union-attr]
    return loss.item()


class Policy(nn.Module):
    """It returns a distribution, which holds the sizes of its batch, or a function of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor, kind: str) -> Any:
        mean = self.net(x)
        return Independent(Normal(mean, 1.0), 1) if kind == "distribution" else lambda y: (y - mean).square()


def returned_distributions(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    return update(optimizer, -model(x, "distribution").log_prob(x[:, :4]).mean()).item()


def returned_functions(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        before = model(x, "function")(x[:, :4]).mean()
    return returned_distributions(model, optimizer, x, y) + before.item()


def computed_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    # Only the first call of a block iterates for the norm, which changes buffers.
    with parametrize.cached():
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x * 0.5), y)
    return update(optimizer, loss).item()


def draw_of_one_row(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    chances = model(torch.ones(1, 6, dtype=x.dtype)).softmax(1)
    update(optimizer, F.cross_entropy(model(x), y))
    return torch.multinomial(chances, 1).item()


class Packed(nn.Module):
    """A recurrent model of sequences whose lengths differ."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pack = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(pack)[0], batch_first=True)
        return self.head(out.mean(1))  # type: ignore[no-any-return]


def packed_sequences(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    return update(optimizer, F.cross_entropy(model(x.view(-1, 3, 2), 1 + y % 3), y)).item()


def inference(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    with torch.inference_mode():
        saved = model.state_dict()
        logits = model(x)
        correct = logits.argmax(1).eq(y).sum().item() + logits[0, 1].item() + model[0](x).sum().item()
    return loss.item() + correct + float(saved["0.weight"].sum()) + logits.mean().item()


def features_of_a_hook(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    kept = []
    handle = model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    loss = F.cross_entropy(model(x), y)
    handle.remove()
    return update(optimizer, loss + kept[0].pow(2).mean()).item()


def calls_that_wait(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    optimizer.zero_grad()
    first = F.cross_entropy(model(x), y)
    # Between the calls and backward the parameters are used by themselves.
    penalty = sum(one.pow(2).sum() for one in model.parameters())
    features = torch.tanh(model[0](x))
    second = model(x * 0.5)
    (first + F.cross_entropy(second, y) + 0.01 * penalty).backward()
    features.mean().backward()
    optimizer.step()
    return first.item() + second.sum().item()


def sums_of_several_calls(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    for _ in range(2):
        out = model(x)
        optimizer.zero_grad()
        F.cross_entropy(out, y).backward()
        F.cross_entropy(model(x + 1), y).backward()
    norm = model[0].weight.grad.norm().item()
    F.cross_entropy(model(x - 1), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    model[2].bias.grad = None
    F.cross_entropy(model(x - 2), y).backward()
    with torch.no_grad():
        out = model(x).mul_(2)
    return norm + float(model[2].bias.grad.sum()) + float(model[0].bias.grad.sum()) + float(out.sum())


def results_changed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    out.mul_(2)
    return update(optimizer, F.cross_entropy(out, y)).item()


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(compute).item()


class Counting(nn.Module):
    """Its coefficient, its count and its auxiliary loss are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.options = perceptron(), 0, SimpleNamespace(beta=1.0)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.net[2](self.norm(self.net[1](self.net[0](x))))
        self.auxiliary = self.options.beta * out.pow(2).mean() / self.calls
        return out


class Centred(nn.Module):
    """Each call assigns buffers, as those of DINO's centre do; the first decides the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("centre", torch.zeros(0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.training:
            mean = out.detach().mean(0)
            self.centre = 0.9 * self.centre + 0.1 * mean if len(self.centre) else mean
            self.calls += 1
        return out - self.centre


def assigned_buffers(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = update(optimizer, F.cross_entropy(model(x), y))
    saved = model.state_dict()
    model.eval()
    result = model(x).sum().item() + model.centre.sum().item() + saved["centre"].norm().item()
    model.train()
    model.centre = model.centre * 0.9 + x.mean()
    return loss.item() + result


def attributes(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = F.cross_entropy(out, y) + model.auxiliary
    model.options.beta *= 0.5
    return update(optimizer, loss).item() + model.calls


HABITS: dict[str, tuple[Step, Callable[[], nn.Module]]] = {
    "a share of the batch": (share_of_the_batch, perceptron),
    "two views": (two_views, perceptron),
    "noise of the loop": (noise_of_the_loop, perceptron),
    "edited gradients": (edited_gradients, perceptron),
    "several losses": (several_losses, perceptron),
    "a gradient penalty": (gradient_penalty, perceptron),
    "a branch on a value": (branch_on_a_value, perceptron),
    "a penalty on parameters": (penalty_on_parameters, perceptron),
    "calls of submodules": (submodules, perceptron),
    "clipped weights": (clipped_weights, perceptron),
    "features of a hook": (features_of_a_hook, perceptron),
    "a closure": (closure, perceptron),
    "inference mode": (inference, perceptron),
    "calls that wait": (calls_that_wait, perceptron),
    "sums of several calls": (sums_of_several_calls, perceptron),
    "results changed in place": (results_changed_in_place, perceptron),
    "attributes of the module": (attributes, Counting),
    "assigned values": (assigned_values, perceptron),
    "averages for a while": (averages_for_a_while, perceptron),
    "state of the optimizer": (state_of_the_optimizer, perceptron),
    "assigned buffers": (assigned_buffers, Centred),
    "an attack": (attack, perceptron),
    "gradients of samples": (gradients_of_samples, perceptron),
    "a changed state dict": (changed_state, perceptron),
    "assigned gradients": (assigned_gradients, perceptron),
    "returned parameters": (returned_parameters, Scaled),
    **{f"{kind} of the module": (kept_by_calls, functools.partial(Keeping, kind)) for kind in _KINDS},
    **{
        f"{kind} of calls": (functools.partial(written_by_calls, kind), Writing)
        for kind in ("print", "log", "file", "table", "warning", "none")
    },
    "returned arguments": (returned_arguments, functools.partial(Passing, False)),
    "returned views": (returned_arguments, functools.partial(Passing, True)),
    "added layers": (added_layers, perceptron),
    "removed layers": (removed_layers, perceptron),
    "replaced parameters": (replaced_parameters, perceptron),
    "wrapped layers": (wrapped_layers, perceptron),
    "replaced tensors": (replaced_tensors, Weighted),
    "changed arguments": (changed_arguments, Changing),
    "returned distributions": (returned_distributions, Policy),
    "returned functions": (returned_functions, Policy),
    "norms computed once": (computed_once, lambda: nn.Sequential(spectral_norm(nn.Linear(6, 4)))),
    "a draw of one row": (draw_of_one_row, perceptron),
    "packed sequences": (packed_sequences, Packed),
    "hooks of the optimizer": (hooks_of_the_optimizer, perceptron),
    "inner steps": (inner_steps, perceptron),
    "state that is kept over updates": (kept_state, perceptron),
    "gradients that are left": (gradients_that_are_left, perceptron),
}


def habit(name: str, stages: tuple[int, ...], rows: int, last: int) -> list[Seen]:
    step, model = HABITS[name]
    return [loop_of(prepare_at(stage), step, model, rows, last) for stage in stages]


# Each habit is shown at one stage, every fifth where the last batch is smaller; in the long run all are, at all stages.
SOME_STAGES = ((0,), (1,), (2,), (3,))


@sliced(
    "name, rows, last, stages",
    [
        *((name, 8, 8 - (number % 5 == 0), SOME_STAGES[number % 4]) for number, name in enumerate(HABITS)),
        ("two views", 5, 4, (3,)),
    ],
    [(name, rows, rows - 1, (0, 1, 2, 3)) for name in HABITS for rows in (5, 8)],
)
def test_a_habit_of_loops_means_what_it_means_in_one_process(
    pool: Pool, name: str, rows: int, last: int, stages: tuple[int, ...]
) -> None:
    step, model = HABITS[name]
    printed, states = loop_of(unprepared, step, model, rows, last)
    for seen in pool.run(2, habit, name, stages, rows, last):
        for stage_printed, stage_states in seen:
            assert stage_printed == pytest.approx(printed, rel=1e-9, abs=1e-12)
            torch.testing.assert_close(stage_states, states, rtol=1e-8, atol=1e-11)
            # Stages add up in one order.
            torch.testing.assert_close(stage_states, seen[0][1], rtol=0, atol=0)


def scaled_in_fp64(prepare: Prepare) -> Seen:
    torch.set_default_dtype(torch.float64)
    try:
        return scripts.scaled(prepare)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_scaler_works_where_fp64_is_the_default(pool: Pool) -> None:
    assert_like_one_process(pool, scaled_in_fp64, stages=(2,), rtol=1e-8)


def unscaled_in_bf16() -> None:
    """The inverse of the scale has more digits than gradients of bf16: it is not rounded to them."""
    for stage, is_read in itertools.product((0, 3), (False, True)):
        torch.manual_seed(0)
        model = nn.Linear(16, 16).to(torch.bfloat16)
        optimizer: Any = torch.optim.SGD(model.parameters())
        model, optimizer, loader = zg.prepare(model, optimizer, [torch.randn(4, 16).bfloat16()] * 3, stage=stage)
        scaler, found = torch.amp.GradScaler("cpu", init_scale=1000.0), []
        for number, x in enumerate(loader):
            scaler.scale(model(x).float().square().mean()).backward()
            if number and is_read:
                assert model.weight.grad is not None
            if number:
                scaler.unscale_(optimizer)
            found.append(model.weight.grad.full_tensor().clone())
            optimizer.zero_grad()
            scaler.update(1000.0)
        assert found[1].equal((found[0].float() / 1000).bfloat16())
        assert found[2].equal(found[1])


def test_a_scaler_unscales_as_exactly_as_torch(pool: Pool) -> None:
    pool.run(2, unscaled_in_bf16)


def own_rows(stage: int, loss: str) -> list[float]:
    """Train on rows that each rank cuts by itself, from weights that differ between ranks before the first call."""
    torch.manual_seed(zg.rank())
    model = perceptron().double()
    model, optimizer = prepare_at(stage)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator, printed = torch.Generator().manual_seed(1), []
    for _ in range(3):
        x, y = torch.randn(8, 6, generator=generator).double(), torch.randint(4, (8,), generator=generator)
        own = slice(zg.rank() * 8 // zg.world_size(), (zg.rank() + 1) * 8 // zg.world_size())
        targets = y if loss == "cross_entropy" else F.one_hot(y, 4).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Torch's of sizes that differ, for instance.
            # As many classes as a rank of two has rows.
            options = {"weight": torch.arange(1.0, 5.0).double()} if loss == "cross_entropy" else {}
            printed.append(update(optimizer, getattr(F, loss)(model(x[own]), targets[own], **options)).item())
    return printed


@sliced("loss", ["cross_entropy", "huber_loss"], ["mse_loss"])
def test_rows_that_a_rank_has_cut_are_its_part_of_the_batch(pool: Pool, loss: str) -> None:
    expected = own_rows(0, loss)
    for printed in pool.run(2, own_rows, 2, loss):
        assert printed == pytest.approx(expected, rel=1e-9)


def counted_rows(as_argument: bool) -> list[str]:
    """Pass the numbers of this rank's rows, which in one process are those of all rows."""
    model, x = zg.prepare(WithLabels() if as_argument else perceptron(), stage=2), torch.ones(4, 6)
    with warnings.catch_warnings(record=True, action="always") as seen:
        for labels in (torch.tensor([0, 1, 2, 2]), torch.arange(3), torch.arange(3)):
            rows = x[: len(labels)]
            model(rows, labels=labels) if as_argument else F.cross_entropy(model(rows), labels)
    return [str(one.message).partition("\n")[0] for one in seen]


class WithLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


@pytest.mark.parametrize("as_argument", [False, True])
def test_numbers_of_own_rows_are_said_to_be_those_of_this_rank(pool: Pool, as_argument: bool) -> None:
    (warning,), of_another_rank = pool.run_afresh(2, counted_rows, as_argument)
    assert warning.startswith("a tensor of 3 rows of this rank has the numbers 0 to 2.")
    assert of_another_rank == []


def halves_of_own_rows() -> tuple[list[str], str]:
    model, x = prepare_at(2)(perceptron()), torch.ones(4, 6)
    with torch.no_grad(), warnings.catch_warnings(record=True, action="always") as seen:
        model(x).chunk(2)
    with pytest.raises(zg.InputError, match="counts the rows of this rank"):
        model(x)[torch.arange(4), torch.ones(4).long()]
    for shape in (lambda out: out.view(len(x), -1), lambda out: out.reshape((len(x), 2, -1))):
        with pytest.raises(zg.InputError, match="begins with 4, the number of rows of this rank"):
            shape(model(x))
    with pytest.raises(zg.InputError) as refused:
        F.normalize(model(x)).chunk(2)
    return [str(one.message) for one in seen], str(refused.value)


def test_halves_of_rows_that_ranks_have_cut_are_refused_where_a_loss_may_depend_on_them(pool: Pool) -> None:
    seen, refused = pool.run(2, halves_of_own_rows)[0]
    assert "the rows of rank 0, then those of rank 1" in "".join(seen)
    assert "pass its loader to zg.prepare()" in refused


def halves_of_global_rows() -> list[float]:
    torch.manual_seed(0)
    model = prepare_at(2)(perceptron().double())
    views = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    if zg.world_size() > 1:
        views = [zg.global_tensor(one.chunk(2)[zg.rank()], zg.sbp.split(0)) for one in views]
    first, second = model(torch.cat([*views])).chunk(2)
    return [(first - second).square().mean().item()]


def test_halves_of_rows_that_are_global_are_those_of_one_process(pool: Pool) -> None:
    expected = halves_of_global_rows()
    assert pool.run(2, halves_of_global_rows) == [pytest.approx(expected)] * 2


def kept_on_one_rank(prepare: Prepare) -> tuple[Seen, list[float]]:
    """Train, while the first rank alone keeps what it has read from parameters that all have made whole."""
    model = seeded(perceptron)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(samples(48, 6), batch_size=8))
    kept: list[Tensor] = []
    printed, read = [], []
    for step, (x, y) in enumerate(loader):
        printed.append(sum(one.norm().item() for one in model.parameters()))
        if zg.rank() == 0 and step in (0, 3):
            kept = [one.detach() for one in model.parameters()]
        update(optimizer, F.cross_entropy(model(x), y))
        read.append(sum(one.norm().item() for one in kept))
        if step == 1:
            kept = []
    return (printed, [dict(model.state_dict())]), read


@sliced("stage", [3], [2])
def test_one_rank_alone_may_keep_what_it_reads_from_parameters(pool: Pool, stage: int) -> None:
    (printed, states), read = kept_on_one_rank(unprepared)
    first, second = pool.run(2, kept_on_one_rank, prepare_at(stage))
    for rank_printed, rank_states in (first[0], second[0]):
        assert rank_printed == pytest.approx(printed, rel=1e-9)
        torch.testing.assert_close(rank_states, states, rtol=1e-8, atol=1e-11)
    assert first[1] == pytest.approx(read, rel=1e-9)


def changed_by_what_was_kept(prepare: Prepare) -> Seen:
    """Change parameters by tensors that were read from them, after calls that split them again."""
    model = seeded(perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(samples(32, 6), batch_size=8))
    kept, printed = [one.data for one in model.parameters()], []
    row, last = kept[0][2], model[2].weight.detach().t()[3]  # type: ignore[index]

    def halve() -> None:
        for one in kept:
            one.mul_(0.5)
        row.add_(0.1)
        last.clamp_(max=0.1)

    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        printed.append(loss.item())
        if step == 1:
            model.state_dict()
            kept = [one.detach() for one in model.parameters()]
        if step < 2:
            update(optimizer, loss)
        printed.append(sum(one.sum().item() for one in (*kept, row, last)))
        model.state_dict()
        halve()
        optimizer.zero_grad()
        optimizer.step()
        halve()
        printed += [model(x).square().sum().item(), sum(one.sum().item() for one in kept)]
        halve()
        printed.append(sum(one.norm().item() for one in model.parameters()))
    return printed, [dict(model.state_dict())]


def changed_in_turn(prepare: Prepare) -> Seen:
    """Change parameters by a state dict, which has a tied one twice, and then themselves; copy a submodule."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)))
    model[1].weight = model[0].weight  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(samples(24, 6), batch_size=8))
    printed = []
    for x, y in loader:
        printed.append(update(optimizer, F.cross_entropy(model(x), y)).item())
        for one in model.state_dict().values():
            one.mul_(0.9)
        printed.append(copy.deepcopy(model[1])(torch.ones(6, dtype=x.dtype)).sum().item())
        with torch.no_grad():
            model[2].bias.add_(1)
    return printed, [dict(model.state_dict())]


@sliced("train, stage", *in_turn([changed_by_what_was_kept, changed_in_turn], (2, 3)))
def test_changes_by_what_was_read_or_copied_reach_parameters_in_order(
    pool: Pool, train: Callable[[Prepare], Seen], stage: int
) -> None:
    assert_like_one_process(pool, train, stages=(stage,), rtol=1e-8)


def kept_state(prepare: Prepare, is_trained: bool = True) -> Seen:
    """Change a model in each step by a state dict that was read before the loop."""
    model, other = seeded(perceptron), seeded(perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, other, optimizer, loader = prepare(model, other, optimizer, DataLoader(samples(24, 6), batch_size=8))
    kept, printed = (model if is_trained else other).state_dict().values(), []
    for x, y in loader:
        printed.append(update(optimizer, F.cross_entropy(model(x), y)).item())
        for one in kept:
            one.mul_(0.9)
        printed.append(other(x).sum().item())
    return printed, [dict(other.state_dict())]


def test_a_state_dict_that_is_kept_changes_a_model_that_is_not_trained(pool: Pool) -> None:
    assert_like_one_process(pool, kept_state, False, stages=(3,))


@pytest.mark.parametrize("train", [changed_in_turn, kept_state])
def test_an_unknown_order_of_changes_is_an_error(pool: Pool, train: Callable[[Prepare], Seen]) -> None:
    with pytest.raises(RanksError, match=r"was changed, and so was its copy in a state_dict\(\)"):
        pool.run(2, train, prepare_at(0))


def prepared_only() -> int:
    prepare_at(2)(perceptron())
    dist.barrier()
    return zg.world_size()


def test_ranks_prepare_alike_whatever_each_has_done_in_a_group_that_is_gone(pool: Pool) -> None:
    pool.run(1, halves_of_global_rows)
    assert pool.run(2, prepared_only) == [2, 2]


class Guided(nn.Module):
    """A model that computes with and without its condition in one batch, and takes the halves apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        with_it, without = self.body(torch.cat([x, torch.zeros_like(x)])).chunk(2)
        out: Tensor = (2 * with_it - without).square().mean()
        return out


def guided() -> list[float]:
    torch.manual_seed(0)
    model = prepare_at(2)(Guided().double())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    return [model(x.chunk(zg.world_size())[zg.rank()]).item() for _ in range(2)]


def test_a_model_that_joins_rows_may_take_them_apart(pool: Pool) -> None:
    expected = guided()
    assert pool.run(2, guided) == [pytest.approx(expected)] * 2


class Tables(nn.Module):
    """A model that keeps a table, and makes a longer one for longer rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = perceptron(), torch.ones(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > len(self.table):
            self.table = torch.arange(float(length))[:, None].double()
        out: Tensor = self.body(x * self.table[:length]).square().mean()
        return out


def tables(prepare: Prepare | None) -> list[tuple[float, int]]:
    torch.manual_seed(0)
    model = Tables().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: Any = [torch.ones(4, length, 6).double() for length in (2, 2, 3, 3, 5, 4)]
    model, optimizer, batches = (prepare or prepare_at(3))(model, optimizer, batches)
    return [(update(optimizer, model(x)).item(), len(model.table)) for x in batches]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_that_a_call_makes_longer_is_there_behind_it(pool: Pool) -> None:
    expected = tables(unprepared)
    for found in pool.run(2, tables, None):
        assert found == [(pytest.approx(loss), length) for loss, length in expected]


class Chain(nn.Module):
    """A model with a loop of its own that generates."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out

    @torch.no_grad()
    def generate(self, ids: Tensor, length: int) -> Tensor:
        for _ in range(length):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def generated() -> list[int]:
    torch.manual_seed(0)
    model = Chain()
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=3)
    model(torch.ones(2, 3, dtype=torch.long)).mean().backward()
    optimizer.step()
    tokens: list[int] = model.generate(torch.ones(1, 1, dtype=torch.long), 4)[0].tolist()
    return tokens


def test_a_model_generates_by_its_own_loop(pool: Pool) -> None:
    torch.manual_seed(0)
    expected = Chain().generate(torch.ones(1, 1, dtype=torch.long), 4)[0].tolist()
    assert pool.run(2, generated) == [expected, expected]
