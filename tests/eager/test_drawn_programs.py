"""Drawn programs: what a loop may do with tensors, on global tensors and on whole plain ones, in fp64."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import zerograph as zg
from tests.harness import sliced
from tests.pool import Pool

# Operators on a matrix [rows, columns] and a random number; the result has at least one element.
Change = Callable[[Tensor, random.Random], Tensor]


def _some_rows(x: Tensor, draw: random.Random) -> Tensor:
    start = draw.randrange(len(x))
    return x[start : draw.randint(start + 1, len(x))]


def _written(x: Tensor, draw: random.Random) -> Tensor:
    copy = x.clone()
    target = draw.choice([copy[draw.randrange(len(x))], copy[:, : 1 + draw.randrange(x.shape[1])], copy.t(), copy])
    kind = draw.randrange(4)
    if kind == 0:
        target.mul_(0.5)
    elif kind == 1:
        target.add_(target.sum())
    elif kind == 2:
        target.zero_()
    else:
        target.copy_(target.clone().flip(0))
    return copy


CHANGES: dict[str, Change] = {
    "tanh": lambda x, draw: x.tanh(),
    "scale": lambda x, draw: x * draw.uniform(-1, 1) + draw.randrange(3),
    "center": lambda x, draw: x - x.mean(draw.randrange(2), keepdim=True),
    "softmax": lambda x, draw: x.softmax(draw.randrange(2)),
    "normalize": lambda x, draw: F.normalize(x + 1e-3, dim=draw.randrange(2)),
    "transpose": lambda x, draw: x.t(),
    "product": lambda x, draw: x @ (x.t() @ x),
    "gram": lambda x, draw: x @ x.t(),
    "cat": lambda x, draw: torch.cat([x, x.flip(0)], draw.randrange(2))[:12, :12],
    "rows": _some_rows,
    "columns": lambda x, draw: x[:, draw.randrange(x.shape[1]) :],
    "sort": lambda x, draw: x.sort(draw.randrange(2)).values,
    "topk": lambda x, draw: x.topk(draw.randint(1, len(x)), 0).values,
    "cumsum": lambda x, draw: x.cumsum(draw.randrange(2)) / 10,
    "roll": lambda x, draw: x.roll(1, draw.randrange(2)),
    "shuffle": lambda x, draw: x[torch.tensor(draw.sample(range(len(x)), len(x)))],
    "mask": lambda x, draw: torch.where(x > x.mean(), x, -x),
    "masked rows": lambda x, draw: torch.cat([x[x[:, 0] >= x[:, 0].mean()], x[:1]]),
    "reshape": lambda x, draw: x.reshape(-1, len(x)) if x.numel() % len(x) == 0 else x,
    "repeat": lambda x, draw: x.repeat(2, 1)[:12],
    "sum": lambda x, draw: x.sum(draw.randrange(2), keepdim=True) + x,
    "outer": lambda x, draw: x.sum(0)[:, None] * x.mean(0)[None],
    "layer norm": lambda x, draw: F.layer_norm(x, x.shape[1:]),
    "batch norm": lambda x, draw: F.batch_norm(x, None, None, training=True) if len(x) > 1 else x,
    "gather": lambda x, draw: x.gather(1, x.abs().argsort(1)),
    "index_add": lambda x, draw: x.index_add(0, torch.zeros(len(x), dtype=torch.long), x),
    "largest": lambda x, draw: x / (1 + x.abs().max()),
    "a value of it": lambda x, draw: x * (0.5 if x.sum().item() > 0 else 2),
    "in place": _written,
    "detached": lambda x, draw: x + x.detach().square(),
}


def run(x: Tensor, seed: int) -> tuple[list[str], Tensor, Tensor]:
    """Run a drawn program; return the names of its changes, its result and the gradient of a loss."""
    draw = random.Random(seed)
    start = x.requires_grad_()
    names = []
    for _ in range(draw.randint(2, 6)):
        name = draw.choice(list(CHANGES))
        names.append(name)
        x = CHANGES[name](x, draw)
    (gradient,) = torch.autograd.grad((x * x).mean() + x.abs().sum() / 7, start)
    return names, x, gradient


def compare(seeds: range) -> list[str]:
    faults = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        draw = random.Random(-seed)
        rows = [draw.randint(1, 5) for _ in range(zg.world_size())] if seed % 2 else [4] * zg.world_size()
        x = torch.randn(sum(rows), draw.choice([4, 6, 16]), generator=generator, dtype=torch.float64)
        names, expected, gradient = run(x.clone(), seed)
        with warnings.catch_warnings(action="ignore", category=zg.ZeroGraphWarning):
            _, result, other = run(zg.global_tensor(x.split(rows)[zg.rank()].clone(), zg.sbp.split(0)), seed)
        pairs = [(result, expected), (other, gradient)]
        values = [(one.full_tensor() if isinstance(one, zg.GlobalTensor) else one, same) for one, same in pairs]
        if any(one.shape != same.shape or not torch.allclose(one, same, 1e-9, 1e-9) for one, same in values):
            faults.append(f"seed {seed}, rows {rows}: {names}")
    return faults


@sliced("ranks, seeds", [(2, range(10)), (3, range(100, 103))], ((2, range(n, n + 10)) for n in range(10, 60, 10)))
def test_drawn_programs_compute_what_they_compute_on_whole_tensors(pool: Pool, ranks: int, seeds: range) -> None:
    assert pool.run(ranks, compare, seeds) == [[]] * ranks
