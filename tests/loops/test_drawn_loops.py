"""Loops of drawn habits on two ranks print and save what they do in one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import sliced
from tests.loops.scripts import Prepare, Seen, prepare_at, samples, seeded, unprepared
from tests.pool import Pool

ROWS, STEPS = 8, 5
# In 68 gradients are clipped between a call that runs operator by operator and its backward, in 244 those of parameters
# that are frozen since.
KEPT = ((68, (3,)), (244, (0,)))


class Two(nn.Module):
    """A model with two results in a dict, of which losses use one, the other, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12)
        self.head, self.tail, self.scale = nn.Linear(12, 4), nn.Linear(12, 3), 1.0

    def forward(self, x: Tensor, *, detached: bool = False) -> dict[str, Tensor]:
        hidden = torch.tanh(self.norm(self.body(x))) * self.scale
        return {"logits": self.head(hidden), "other": self.tail(hidden.detach() if detached else hidden)}


class Loop:
    """A training loop that does what a generator of random numbers says."""

    def __init__(self, prepare: Prepare, seed: int) -> None:
        self.draw, self.printed = random.Random(seed), []  # type: ignore[var-annotated]
        # Whether a step is inside of no_sync(), which changes no number.
        self.unsynced = random.Random(-seed - 1)
        model = seeded(Two)
        kind = self.draw.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
        groups: list[Any] = [list(model.body.parameters()), [*model.norm.parameters(), *model.head.parameters()]]
        groups[1] += model.tail.parameters()
        optimizers = [
            kind(one, lr=0.02) for one in (groups if self.draw.random() < 0.3 else [[*groups[0], *groups[1]]])
        ]
        # In odd loops ranks hold unequal numbers of rows.
        rows = ROWS - seed % 2
        x, y = samples(rows * STEPS, 6).tensors
        batches: Any = list(zip(x.split(rows), y.split(rows), strict=True))
        self.model, *self.optimizers, self.loader = prepare(model, *optimizers, batches)

    def run(self) -> Seen:
        """Return what the loop prints, and the state at the end."""
        habits = self.draw.sample(self.habits(), 4)
        for x, y in self.loader:
            is_unsynced = self.unsynced.random() < 0.5
            with getattr(self.model, "no_sync", contextlib.nullcontext)() if is_unsynced else contextlib.nullcontext():
                losses = self.backward(x, y, habits)
            for habit in self.draw.sample(habits, 2):
                habit(x, y)
            for optimizer in self.optimizers:
                optimizer.step()
            self.printed.append(float(losses[0].detach()))
            if self.draw.random() < 0.8:
                self.zero_grad()
        return self.printed, [dict(self.model.state_dict())]

    def backward(self, x: Tensor, y: Tensor, habits: list[Callable[[Tensor, Tensor], None]]) -> list[Tensor]:
        """Run the calls of a step and backward, and return the losses."""
        losses = self.losses(x, y)
        if self.draw.random() < 0.5:
            self.zero_grad()
        for habit in self.draw.sample(habits, 2):
            habit(x, y)
        if len(losses) > 1 and self.draw.random() < 0.5:
            for loss in losses[:-1]:
                loss.backward(retain_graph=True)
            losses[-1].backward()
        else:
            sum(losses).backward()  # type: ignore[union-attr]
        return losses

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return losses of one or two calls."""
        out = self.model(x)
        which = self.draw.randrange(4)
        if which == 0:
            return [F.cross_entropy(out["logits"], y)]
        if which == 1:
            return [F.cross_entropy(out["logits"], y), out["other"].square().mean()]
        if which == 2:
            return [F.cross_entropy(out["logits"], y) + self.model(x * 0.5, detached=True)["other"].abs().mean()]
        return [out["other"].square().mean(), F.cross_entropy(self.model(x.flip(0))["logits"], y)]

    def zero_grad(self) -> None:
        """Clear gradients in one of the usual ways."""
        if self.draw.random() < 0.3:
            self.model.zero_grad()
        else:
            set_to_none = self.draw.random() < 0.7
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)

    def habits(self) -> list[Callable[[Tensor, Tensor], None]]:
        """Return what else a loop may do in a step."""
        model, printed = self.model, self.printed

        def another_backward(x: Tensor, y: Tensor) -> None:
            F.cross_entropy(model(x + 0.1)["logits"], y).backward()

        def clip(x: Tensor, y: Tensor) -> None:
            printed.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))

        def clip_values(x: Tensor, y: Tensor) -> None:
            if any(one.grad is not None for one in model.parameters()):
                nn.utils.clip_grad_value_(model.parameters(), 0.05)

        def read_gradients(x: Tensor, y: Tensor) -> None:
            printed.append(sum(float(one.grad.abs().sum()) for one in model.parameters() if one.grad is not None))

        def edit_gradient(x: Tensor, y: Tensor) -> None:
            if model.head.weight.grad is not None:
                model.head.weight.grad.mul_(0.5)

        def drop_gradient(x: Tensor, y: Tensor) -> None:
            model.tail.bias.grad = None

        def evaluate(x: Tensor, y: Tensor) -> None:
            model.eval()
            with torch.no_grad():
                printed.append(float((model(x)["logits"].argmax(1) == y).double().mean()))
            model.train()

        def penalty(x: Tensor, y: Tensor) -> None:
            sum(one.square().sum() for one in model.parameters()).mul(0.01).backward()  # type: ignore[union-attr]

        def of_input(x: Tensor, y: Tensor) -> None:
            given = x.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(given)["logits"].square().sum(), given)
            printed.append(float(gradient.abs().sum()))

        def input_with_gradient(x: Tensor, y: Tensor) -> None:
            given = x.detach().clone().requires_grad_()
            model(given)["other"].square().mean().backward()
            printed.append(float(given.grad.abs().sum()))  # type: ignore[union-attr]

        def submodule(x: Tensor, y: Tensor) -> None:
            model.body(x).mean().backward()

        def flag(x: Tensor, y: Tensor) -> None:
            model.scale = 0.5 if model.scale == 1.0 else 1.0

        def freeze(x: Tensor, y: Tensor) -> None:
            model.tail.requires_grad_(not model.tail.weight.requires_grad)

        def clamp(x: Tensor, y: Tensor) -> None:
            with torch.no_grad():
                printed.append(float(model.body.weight.abs().max()))

        def changed_result(x: Tensor, y: Tensor) -> None:
            out = model(x)["logits"]
            out += 1
            (out * out).mean().backward()

        return [
            another_backward,
            clip,
            clip_values,
            read_gradients,
            edit_gradient,
            drop_gradient,
            evaluate,
            penalty,
            of_input,
            input_with_gradient,
            submodule,
            flag,
            freeze,
            clamp,
            changed_result,
        ]


def drawn(seed: int, stages: tuple[int, ...]) -> list[Seen]:
    """Return what a loop does at each stage."""
    return [Loop(prepare_at(stage), seed).run() for stage in stages]


@sliced("seed, stages", KEPT, [(seed, ((0, 3), (1,), (2,), (3,))[seed % 4]) for seed in range(500)])
def test_a_drawn_loop_prints_and_saves_what_one_process_does(pool: Pool, seed: int, stages: tuple[int, ...]) -> None:
    printed, (state,) = Loop(unprepared, seed).run()
    for seen in pool.run(2, drawn, seed, stages):
        for stage_printed, (stage_state,) in seen:
            assert stage_printed == pytest.approx(printed, rel=1e-8, abs=1e-10)
            torch.testing.assert_close(stage_state, state, rtol=1e-8, atol=1e-10)
