"""Single options on the device: the numbers of plain PyTorch there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.gpu.comparison import BodyStep, adamw, deviation, fused, inputs, perceptron, reproduction, train

Record = Callable[[str, object], None]
CLOSE = 1e-6


def trained(device: str, batches: list[Tensor] | None = None, **options: Any) -> list[float]:
    """Return the losses of a step with these options."""
    model = perceptron(device)
    step = BodyStep(model, fused(model), **options)
    return [float(step(x)) for x in batches or inputs(device)]


def plainly(device: str, batches: list[Tensor] | None = None) -> list[float]:
    model = perceptron(device)
    return train(model, fused(model), batches or inputs(device))


OPTIMIZERS: dict[str, Callable[[nn.Module, bool], torch.optim.Optimizer]] = {
    "fused": lambda model, cuda: adamw(model, fused=True),
    "foreach": lambda model, cuda: adamw(model, foreach=True),
    "for-loop": lambda model, cuda: adamw(model, foreach=False),
    "capturable": lambda model, cuda: adamw(model, capturable=cuda),
    "sgd": lambda model, cuda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda model, cuda: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "adagrad": lambda model, cuda: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "muon": lambda model, cuda: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in OPTIMIZERS])
def test_an_optimizer_updates_as_in_plain_pytorch(name: str, device: str, record_property: Record) -> None:
    make, batches = OPTIMIZERS[name], inputs(device)
    model, plain = perceptron(device), perceptron(device)
    step = BodyStep(model, make(model, device == "cuda"))
    apart = deviation([float(step(x)) for x in batches], train(plain, make(plain, device == "cuda"), batches))
    record_property("deviation", apart)
    assert apart < CLOSE


def test_fp16_leaves_out_the_steps_that_overflow(device: str) -> None:
    model, first = perceptron(device), 2.0**30
    step = BodyStep(model, fused(model))
    step.config.enable_amp(dtype=torch.float16)
    scaler = step.config.precision.grad_scaler = zg.GradScaler(init_scale=first)
    losses = [float(step(x)) for x in inputs(device) * 5]
    untrained = [reproduction(perceptron(device), x).item() for x in inputs(device)]
    assert scaler.get_scale() < first
    assert losses[:3] == pytest.approx(untrained[:3], rel=1e-3)
    assert losses[-1] < 0.99 * untrained[-1]


@pytest.mark.long
def test_bf16_is_autocast(device: str, record_property: Record) -> None:
    model, plain = perceptron(device), perceptron(device)
    step = BodyStep(model, fused(model))
    step.config.enable_amp(dtype=torch.bfloat16)
    losses = [float(step(x)) for x in inputs(device)]
    apart = deviation(losses, train(plain, fused(plain), inputs(device), autocast=torch.bfloat16))
    record_property("deviation", apart)
    assert apart < 5e-4


def test_micro_batches_accumulate(device: str) -> None:
    assert deviation(trained(device, gradient_accumulation_steps=4), plainly(device)) < CLOSE


@pytest.mark.long
def test_recompute_changes_no_number(device: str) -> None:
    assert deviation(trained(device, activation_checkpointing="auto"), plainly(device)) < CLOSE


@pytest.mark.long
def test_batches_of_any_size(device: str) -> None:
    batches = [x[: 20 + 7 * number % 40] for number, x in enumerate(inputs(device) * 2)]
    assert deviation(trained(device, batches), plainly(device, batches)) < CLOSE


@pytest.mark.long
@pytest.mark.parametrize("options", [{"wire": zg.wire("int8")}, {"optimizer_state": "int8"}], ids=["wire", "state"])
def test_eight_bits(options: dict[str, Any], device: str) -> None:
    assert deviation(trained(device, **options), plainly(device)) < 1e-2


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_a_prepared_loop_with_clipping(stage: int, device: str, record_property: Record) -> None:
    losses: dict[bool, list[float]] = {False: [], True: []}
    for ours, out in losses.items():
        model = perceptron(device)
        optimizer = fused(model)
        if ours:
            model, optimizer = zg.prepare(model, optimizer, stage=stage)
        for x in inputs(device):
            loss = (model(x) - x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
    apart = deviation(losses[True], losses[False])
    record_property("deviation", apart)
    assert apart < CLOSE


def test_a_checkpoint_resumes_bitwise(device: str, tmp_path: Path) -> None:
    batches = inputs(device)
    model, other = perceptron(device), perceptron(device, seed=1)
    step, resumed = BodyStep(model, fused(model)), BodyStep(other, fused(other))
    for x in batches[:3]:
        step(x)
    step.save(tmp_path)
    resumed.load(tmp_path)
    assert [float(step(x)) for x in batches] == [float(resumed(x)) for x in batches]


@pytest.mark.long
def test_gathered_parameters_are_on_the_device(card: str) -> None:
    model = perceptron(card)
    step = BodyStep(model, fused(model))
    step(inputs(card)[0])
    with step.full_parameters():
        assert {parameter.device.type for parameter in model.parameters()} == {card}
