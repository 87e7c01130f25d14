"""Training scripts as users write them: plain where ``prepare`` returns its arguments, else over all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import zerograph as zg

Prepare = Callable[..., Any]
# Numbers that the script printed, and the states that it saved.
Seen = tuple[list[float], list[dict[str, Any]]]


def unprepared(*objects: Any) -> Any:
    return objects[0] if len(objects) == 1 else objects


def prepare_at(stage: int) -> Prepare:
    return functools.partial(zg.prepare, stage=stage)


def assert_like_one_process(
    pool: Any, train: Callable[..., Any], *args: Any, stages: Iterable[int], rtol: float = 1e-9
) -> None:
    """Compare what ``train(prepare, *args)`` returns on two ranks, at each stage, with what it does in one process."""
    expected = train(unprepared, *args)
    for stage in stages:
        for seen in pool.run(2, train, prepare_at(stage), *args):
            torch.testing.assert_close(seen, expected, rtol=rtol, atol=1e-11)


def run_by_rules(name: str, prepare: Prepare, options: dict[str, Any]) -> Seen:
    """Run a script in which every operator has a rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no rule says")
        seen: Seen = globals()[name](prepare, **options)
    return seen


def check_as_in_one_process(name: str, options: dict[str, Any], seen_by_ranks: Iterable[Seen]) -> None:
    """Compare what ranks have printed and saved with the script in one process."""
    printed, states = globals()[name](unprepared, **options)
    for rank_printed, rank_states in seen_by_ranks:
        assert rank_printed == pytest.approx(printed, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(rank_states, states, rtol=1e-9, atol=1e-12)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def samples(count: int, *shape: int, classes: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, classes, (count,), generator=generator))


class ConvNet(nn.Module):
    """A small image classifier with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        return out


class Meter:
    """The average of a number over samples, as the ImageNet example has it."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n


def imagenet(prepare: Prepare, accumulation: int = 1) -> Seen:
    """Read losses before backward; evaluate after each epoch; step the schedule by epochs."""
    model = seeded(ConvNet)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train = DataLoader(samples(24, 3, 6, 6, classes=6), batch_size=8, shuffle=True)
    val = DataLoader(samples(10, 3, 6, 6, classes=6), batch_size=5)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, train, val, scheduler = prepare(model, optimizer, train, val, scheduler)
    printed: list[float] = []
    torch.manual_seed(3)
    for _ in range(2):
        model.train()
        for i, (images, target) in enumerate(train):
            loss = criterion(model(images), target)
            printed.append(loss.item())
            if i % accumulation == 0:
                optimizer.zero_grad()
            (loss / accumulation).backward()
            if i % accumulation == accumulation - 1:
                optimizer.step()
        optimizer.zero_grad()
        model.eval()
        losses = Meter()
        with torch.no_grad():
            for images, target in val:
                output = model(images)
                losses.update(criterion(output, target).item())
                printed.append((output.argmax(1) == target).sum().item())
        printed.append(losses.sum)
        scheduler.step()
    return printed, [copy.deepcopy(model.state_dict())]


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (one.view(b, t, 2, c // 2).transpose(1, 2) for one in self.attend(self.norms[0](x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).contiguous().view(b, t, c))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class GPT(nn.Module):
    """A small language model that returns logits and loss, as nanoGPT's does; its weights are tied."""

    def __init__(self, vocabulary: int = 17, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def nanogpt(prepare: Prepare, accumulation: int = 1) -> Seen:
    """Accumulate, clip, warm the rate up by hand, evaluate now and then."""
    model = seeded(GPT)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, 17, (400,), generator=generator)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(380, (4,), generator=generator).tolist()
            yield torch.stack([text[i : i + 8] for i in starts]), torch.stack([text[i + 1 : i + 9] for i in starts])

    model, optimizer, loader = prepare(model, optimizer, batches())
    data = iter(loader)
    printed: list[float] = []
    x, y = next(data)
    for number in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (number + 1) / 4
        if number % 2 == 0:
            model.eval()
            with torch.no_grad():
                printed.append(model(x, y)[1].item())
            model.train()
        for _ in range(accumulation):
            _, loss = model(x, y)
            loss = loss / accumulation
            x, y = next(data)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        printed.append(loss.item() * accumulation)
    return printed, [copy.deepcopy(model.state_dict())]


def gan(prepare: Prepare) -> Seen:
    """Train two models in turn; the generator learns through the discriminator, as in the DCGAN example."""
    generator = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)))
    discriminator = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()))
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    noise = samples(32, 4).tensors[0].split(8)
    loader: Any = list(zip(samples(32, 6).tensors[0].split(8), noise, strict=True))
    objects = prepare(generator, discriminator, optimizer_d, optimizer_g, loader)
    generator, discriminator, optimizer_d, optimizer_g, loader = objects
    printed: list[float] = []
    for real, z in loader:
        discriminator.zero_grad()
        label = torch.full((real.size(0),), 1.0, dtype=real.dtype)
        output = discriminator(real).view(-1)
        error_real = criterion(output, label)
        error_real.backward()
        fake = generator(z)
        label.fill_(0.0)
        output = discriminator(fake.detach()).view(-1)
        error_fake = criterion(output, label)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        output = discriminator(fake).view(-1)
        error = criterion(output, label)
        error.backward()
        optimizer_g.step()
        printed += [(error_real + error_fake).item(), error.item(), output.mean().item()]
    return printed, [copy.deepcopy(generator.state_dict()), copy.deepcopy(discriminator.state_dict())]


def distillation(prepare: Prepare) -> Seen:
    """Learn from a frozen teacher and from labels."""
    teacher = seeded(lambda: nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))).eval()
    student = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)))
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    loader = DataLoader(samples(22, 8), batch_size=8)
    teacher, student, optimizer, loader = prepare(teacher, student, optimizer, loader)
    printed: list[float] = []
    for x, y in loader:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, dim=-1)
        logits = student(x)
        loss = 0.5 * F.kl_div(F.log_softmax(logits / 2, dim=-1), soft, reduction="batchmean") * 4
        loss += 0.5 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return printed, [copy.deepcopy(student.state_dict())]


class Variational(nn.Module):
    """An autoencoder with distributions in its forward, and parametrized layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = weight_norm(nn.Linear(8, 6)), spectral_norm(nn.Linear(3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        posterior, prior = Normal(mean, (log_variance / 2).exp()), Normal(torch.zeros_like(mean), 1.0)
        decoded: Tensor = self.decode(posterior.mean)
        return decoded, kl_divergence(posterior, prior).sum(1).mean()


def variational(prepare: Prepare) -> Seen:
    """Train it, and score what it decodes by a distribution outside of the model."""
    model = seeded(Variational)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(samples(22, 8), batch_size=8))
    printed: list[float] = []
    for x, _ in loader:
        decoded, divergence = model(x)
        loss = divergence / 10 - Normal(decoded, 1.0, validate_args=False).log_prob(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        printed.append(loss.item())
    return printed, [copy.deepcopy(model.state_dict())]


def averaged(prepare: Prepare) -> Seen:
    """Keep a moving average of the weights, and evaluate it."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(samples(22, 8), batch_size=8))

    def whole() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if prepare is unprepared else zg.full_parameters(model)

    with whole():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with whole():
            average.update_parameters(model)
    with torch.no_grad(), whole():
        printed = [model(torch.ones(1, 8).double()).sum().item(), average(torch.ones(1, 8).double()).sum().item()]
    return printed, [copy.deepcopy(model.state_dict()), copy.deepcopy(average.module.state_dict())]


def two_parts(prepare: Prepare) -> Seen:
    """Update encoder and decoder by two optimizers after one backward; skip a batch; the last batch has one row."""
    encoder, decoder = seeded(lambda: nn.Linear(8, 6)), seeded(lambda: nn.Linear(6, 4))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (encoder, decoder)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    loader = DataLoader(samples(25, 8), batch_size=8)
    encoder, decoder, first, second, loader = prepare(encoder, decoder, *optimizers, loader)
    printed: list[float] = []
    for number, (x, y) in enumerate(loader):
        first.zero_grad()
        second.zero_grad()
        loss = F.cross_entropy(decoder(encoder(x).tanh()), y) + decoder(encoder(-x).relu()).square().mean()
        if number == 1:
            continue
        loss.backward()
        first.step()
        schedulers[0].step()
        second.step()
        schedulers[1].step()
        printed.append(loss.item())
    return printed, [copy.deepcopy(encoder.state_dict()), copy.deepcopy(decoder.state_dict())]


def windows(prepare: Prepare, accumulation: int = 3, clips: bool = True) -> Seen:
    """Accumulate over windows, the last of them smaller, as Trainer and Accelerate do; clip by hand; log in between."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Of the last batch, one of two ranks has one row, of which batch norm alone would have no variance.
    loader = DataLoader(samples(51, 8), batch_size=8)
    model, optimizer, loader = prepare(model, optimizer, loader)
    printed: list[float] = []
    total = torch.tensor(0.0, dtype=torch.float64)
    for number, (x, y) in enumerate(loader):
        window = min(accumulation, len(loader) - number // accumulation * accumulation)
        loss = F.cross_entropy(model(x), y) / window
        loss.backward()
        total += loss.detach()
        if number == 1:
            printed += [total.item(), loss.item()]
        if (number + 1) % accumulation == 0 or number + 1 == len(loader):
            if clips:
                gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                printed.append(norm.item())
                for gradient in gradients:
                    gradient.mul_(min(1.0, 0.3 / norm.item()))
            optimizer.step()
            optimizer.zero_grad()
    printed.append(total.item())
    return printed, [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]


def scaled(prepare: Prepare, fused: bool = False) -> Seen:
    """Scale the loss, unscale and clip gradients, skip an update that overflows."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=fused)
    loader = DataLoader(samples(32, 8), batch_size=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    model, optimizer, loader = prepare(model, optimizer, loader)
    printed: list[float] = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * float("inf") if number == 2 else loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
            printed.append(norm if math.isfinite(norm) else -1.0)
        scaler.step(optimizer)
        scaler.update()
        printed += [loss.item(), scaler.get_scale()]
    return printed, [copy.deepcopy(model.state_dict())]
