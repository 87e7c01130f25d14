"""``config.checks.on_nonfinite``: a step whose loss or gradients are not finite changes nothing, and says what made it
so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerograph as zg
from tests.harness import LossStep, Predict, mean_of_squares, needs_compiler, sliced
from tests.models import update_by
from tests.pool import Pool
from zerograph._torch import pytree

NAN = float("nan")
BATCH = 8
GRID = [[0, 1], [2, 3]]


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Root(nn.Module):
    """Its derivative at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x[:, None] * self.weight)


class Model(nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.lin, self.norm, self.head = nn.Linear(5, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.log, self.root = Log(), Root()

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.head(
            self.norm(self.lin(x)).tanh() * self._behind(self.root, b) + self._behind(self.log, a)[:, None]
        )

    def _behind(self, module: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(module, x, use_reentrant=False) if self.recomputed else module(x)
        return found


class Step(LossStep):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(model, optimizer, loss=mean_of_squares, scheduler=schedule)


class InParts(Step):
    """Two losses, each with a ``backward()`` of its own."""

    def build(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first, second = self.model(x, a, b).square().mean(0).unbind()
        first.backward(retain_graph=True)
        second.backward()
        return first + second


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batch(seed: int, **changes: tuple[int, float]) -> list[Tensor]:
    """The whole batch: ``a=(6, -1.0)`` makes element 6 of ``a`` that; of ``x`` the first of the row's."""
    torch.manual_seed(seed)
    made = {"x": torch.randn(BATCH, 5), "a": torch.rand(BATCH) + 0.5, "b": torch.rand(BATCH) + 0.5}
    for name, (row, value) in changes.items():
        made[name][row, ...] = value
    return list(made.values())


def part(tensors: list[Tensor]) -> list[Tensor]:
    return [one.chunk(zg.world_size())[zg.rank()] for one in tensors]


def made(optimizer: Callable[[nn.Module], torch.optim.Optimizer], stage: int, **options: Any) -> Step:
    torch.manual_seed(0)
    model = Model(options.pop("recomputed", False))
    parts = options.pop("parts", False)
    step = (InParts if parts else Step)(model, optimizer(model))
    if zg.world_size() == 4:
        step.config.mesh.placement, step.config.mesh.input_sbp = zg.placement("cpu", ranks=GRID), (zg.sbp.split(0),) * 2
    step.config.set(stage=stage)
    if (folder := options.pop("files", None)) is not None:
        files = zg.OffloadTo("nvme", folder)
        step.config.memory.offload = zg.Offload(optimizer=files, parameters=files)
    step.config.set(**options)
    return step


def bits(state: Any) -> list[Any]:
    """Everything in a state, tensors as bytes: NaN is equal to itself, and -0.0 is not 0.0."""
    leaves, spec = pytree.tree_flatten(state)
    return [spec, *(bytes(one.contiguous().numpy().tobytes()) if isinstance(one, Tensor) else one for one in leaves)]


def attempted(step: Step, tensors: list[Tensor]) -> tuple[str, bool]:
    """The error's message, and whether everything is as it was."""
    # Compiling settles the seed of random numbers.
    step.compile(*part(tensors))
    before = bits(step.state_dict())
    with pytest.raises(zg.NonFiniteError) as caught:
        step(*part(tensors))
    return str(caught.value), bits(step.state_dict()) == before


def raising(optimizer: Any, stage: int, options: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    step = made(optimizer, stage, on_nonfinite="raise", **options)
    found = {"before the first update": attempted(step, batch(0, a=(6, -1.0)))}
    step(*part(batch(1)))
    found["forward"] = attempted(step, batch(2, a=(6, -1.0)))
    found["backward"] = attempted(step, batch(2, b=(6, 0.0)))
    found["batch"] = attempted(step, batch(2, x=(6, NAN)))
    # It goes on from there.
    step(*part(batch(3)))
    with step.full_parameters(), torch.no_grad():
        step.model.head.weight[1, 2] = float("inf")
    found["parameter"] = attempted(step, batch(4))
    assert step.steps_done == 2
    return found


# Each optimizer, stage and option once.
ARRANGEMENTS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "data parallel": (momentum, 0, {}),
    "stage 1, dealt": (momentum, 1, {"shard_by": "parameters"}),
    "stage 2, fused": (adamw, 2, {"clip_grad_norm": 1.0}),
    "stage 3, micro-batches": (adamw, 3, {"gradient_accumulation_steps": 2, "batch_norm": "local"}),
    "stage 3, recomputed": (adamw, 3, {"recomputed": True}),
    "stage 2, two backward()": (adamw, 2, {"parts": True}),
    "stage 3, files": (adamw, 3, {"files": "folder"}),
    "stage 2, inductor, micro-batches": (
        *(momentum, 2),
        {"backend": "inductor", "gradient_accumulation_steps": 2, "batch_norm": "local"},
    ),
}


@sliced(
    "arrangement",
    ["data parallel", "stage 3, files"],
    [pytest.param(one, marks=[needs_compiler] * ("inductor" in one)) for one in ARRANGEMENTS],
)
def test_raise_names_what_made_it_and_leaves_every_bit_as_it_was(pool: Pool, arrangement: str, tmp_path: Path) -> None:
    optimizer, stage, options = ARRANGEMENTS[arrangement]
    options = {name: str(tmp_path) if value == "folder" else value for name, value in options.items()}
    first, second = pool.run(2, raising, optimizer, stage, options)
    assert first == second
    assert [unchanged for _, unchanged in first.values()] == [True] * len(first)
    said = {name: message for name, (message, _) in first.items()}
    # Sample 6 of 8 is rank 1's third of four: of two micro-batches in the second.
    turn, count = (" in micro-batch 2 of 2", 2) if "micro" in arrangement else ("", 4)
    for name in ("before the first update", "forward"):
        assert f"first in the forward of model.log{turn}\n" in said[name]
        assert "test_nonfinite.py" in said[name]
        assert "return torch.log(x)" in said[name]
        assert f"aten.log.default computed 1 NaN of {count} elements on rank 1, from finite ones" in said[name]
        assert "rank 0" not in said[name]
    assert f"first in the backward of model.root{turn}\n" in said["backward"]
    assert "return torch.sqrt(x[:, None] * self.weight)" in said["backward"]
    assert "on rank 1, from finite ones" in said["backward"]
    assert "rank 0" not in said["backward"]
    assert "step 1 " in said["before the first update"]
    assert "step 2 " in said["forward"]
    assert "args[0][2, 0] is not a number on rank 1 (5 NaN of 20 elements)" in said["batch"]
    assert "parameter model.head.weight[1, 2] is infinite on rank" in said["parameter"]


@pytest.mark.long
def test_raise_names_the_rank_of_four(pool: Pool) -> None:
    everybody = pool.run(4, raising, adamw, 2, {})
    assert all(one == everybody[0] for one in everybody)
    assert [unchanged for _, unchanged in everybody[0].values()] == [True] * 5
    # Sample 6 of 8 is the first of the last rank's two.
    message, _ = everybody[0]["forward"]
    assert "first in the forward of model.log\n" in message
    assert "aten.log.default computed 1 NaN of 2 elements on rank 3, from finite ones" in message
    assert "rank 0" not in message


def skipping(stage: int) -> tuple[Any, ...]:
    step = made(adamw, stage, on_nonfinite="skip")
    with warnings.catch_warnings(record=True, action="always") as caught:
        for seed, changes in SCRIPT:
            step(*part(batch(seed, **changes)))
    said = [str(one.message) for one in caught if "was skipped" in str(one.message)]
    state = step.state_dict()
    return said, step.steps_skipped, step.steps_done, state["lr_schedulers"][0]["last_epoch"], state["modules"]["model"]


SCRIPT: list[tuple[int, dict[str, Any]]] = [(0, {"a": (1, -1.0)}), (1, {}), (2, {"b": (6, 0.0)}), (3, {}), (4, {})]


def test_skip_trains_as_if_the_batch_had_not_been_there(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for seed, changes in SCRIPT:
        if not changes:
            update_by(optimizer, model(*batch(seed)).square().mean())
            scheduler.step()
    for said, skipped, done, epoch, state in pool.run(2, skipping, 2):
        assert (len(said), skipped, done, epoch) == (1, 2, 3, 3)
        assert "step 1 was skipped" in said[0]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)


@needs_compiler
def test_inductor_checks_in_its_own_kernels_and_explains_in_eager() -> None:
    step = made(momentum, 0, on_nonfinite="raise", backend="inductor")
    step(*batch(1))
    message, unchanged = attempted(step, batch(2, a=(3, -1.0)))
    assert unchanged
    assert "first in the forward of model.log\n" in message


def test_nothing_is_looked_at_unless_asked_for() -> None:
    step = made(momentum, 0)
    loss = step(*batch(0, a=(1, -1.0)))
    assert loss.isnan()
    assert step.steps_done == 1
    roles = step.inspect.graph.graph.output_node().meta["roles"]
    assert {one.kind for one in roles} == {"output"}
    plain = len(step.inspect.graph.graph.nodes)
    step.config.checks.on_nonfinite = "skip"
    step.compile(*batch(0))
    assert len(step.inspect.graph.graph.nodes) > plain


def scaled(scaler: zg.GradScaler) -> Step:
    return made(adamw, 0, on_nonfinite="raise", grad_scaler=scaler)


def test_an_overflow_that_the_scaler_deals_with_is_no_error() -> None:
    # Beyond 2^127 the gradients of fp32 overflow, whatever the loss is.
    step = scaled(zg.GradScaler(init_scale=2.0**127, backoff_factor=2.0**-64))
    before = step.model.norm.running_mean.clone()
    step(*(20 * one for one in batch(0)))
    assert (step.steps_done, step.steps_skipped) == (0, 0)
    assert step.config.precision.grad_scaler is not None
    assert step.config.precision.grad_scaler.get_scale() == 2.0**63
    # As under torch's GradScaler.
    assert not torch.equal(step.model.norm.running_mean, before)
    step(*batch(1))
    assert step.steps_done == 1


@pytest.mark.parametrize(
    "scaler", [zg.GradScaler(init_scale=2.0**127, min_scale=2.0**127), zg.StaticGradScaler(2.0**127)]
)
def test_an_overflow_is_an_error_where_the_scale_cannot_fall(scaler: zg.GradScaler) -> None:
    step = scaled(scaler)
    message, unchanged = attempted(step, [20 * one for one in batch(0)])
    assert unchanged
    assert "from finite ones" in message


def test_a_loss_that_is_not_finite_unscaled_is_an_error_and_leaves_the_scale() -> None:
    step = scaled(zg.GradScaler(init_scale=4.0))
    message, unchanged = attempted(step, batch(0, a=(2, -1.0)))
    assert unchanged
    assert "forward of model.log" in message


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: Tensor, open_: Tensor) -> Tensor:
        scores = x @ self.weight @ x.transpose(1, 2) + self.mask
        return torch.softmax(scores.masked_fill(open_[:, None, None] == 0, float("-inf")), -1) @ x


class Attend(LossStep):
    def __init__(self) -> None:
        model = Attention()
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_of_squares)


def test_infinities_of_a_mask_are_not_what_is_blamed() -> None:
    step = Attend()
    step.config.checks.on_nonfinite = "raise"
    x, open_ = torch.randn(2, 4, 4), torch.ones(2)
    step(x, open_)
    with pytest.raises(zg.NonFiniteError, match=r"softmax.* computed 16 NaN of 32 elements on rank 0, from infinities"):
        step(x, torch.tensor([1.0, 0.0]))


def test_a_graph_that_only_predicts_checks_its_losses_and_keeps_its_buffers() -> None:
    step = Predict(Model(), lambda model, *batch: model(*batch).sum(), on_nonfinite="raise")
    before = step.model.norm.running_mean.clone()
    with pytest.raises(zg.NonFiniteError, match=r"a forward pass is not finite, first in the forward of model\.log"):
        step(*batch(0, a=(2, -1.0)))
    assert torch.equal(step.model.norm.running_mean, before)
