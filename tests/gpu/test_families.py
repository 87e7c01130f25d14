"""Each family trains on the device as in plain PyTorch there, eagerly and through Inductor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests.gpu import comparison
from tests.gpu.comparison import LIMITS, FamilyStep, deviation, plain_losses
from tests.gpu.families import FAMILIES
from tests.harness import needs_compiler

Record = Callable[[str, object], None]
LONG = pytest.mark.long
# Families whose cells run on the CPU too: (family, precision, backend).
SLICE = {("llama", "bf16", "eager"), ("conv", "fp32", "eager"), ("mlp", "fp32", "inductor")}


def cells(backend: str, *names: str) -> list[object]:
    return [
        pytest.param(
            name, precision, id=f"{name}-{precision}", marks=[] if (name, precision, backend) in SLICE else LONG
        )
        for name in names
        for precision in ("fp32", "bf16")
    ]


def check(name: str, precision: str, backend: str, device: str, steps: int, record: Record) -> None:
    family = comparison.family(name, device, steps)
    try:
        expected = plain_losses(family.model, family.batches, device, precision)
    except RuntimeError as error:
        pytest.skip(f"plain PyTorch does not train it: {error}")
    step = FamilyStep(copy.deepcopy(family.model), 3, device, precision, backend=backend)
    apart = deviation([float(step(**batch)) for batch in family.batches], expected)
    record("deviation", apart)
    assert apart < LIMITS[precision]


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), cells("inductor", "llama", "gpt2", "mlp"))
def test_inductor_trains_as_plain_pytorch(
    name: str, precision: str, device: str, steps: int, record_property: Record
) -> None:
    check(name, precision, "inductor", device, steps, record_property)


@pytest.mark.parametrize(("name", "precision"), cells("eager", *FAMILIES))
def test_a_family_trains_as_plain_pytorch(
    name: str, precision: str, device: str, steps: int, record_property: Record
) -> None:
    check(name, precision, "eager", device, steps, record_property)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert", "t5"])
def test_dropout_draws_the_cpu_s_masks(name: str, card: str, steps: int, record_property: Record) -> None:
    losses = {}
    for place in ("cpu", card):
        family = comparison.family(name, place, steps, dropout=0.1)
        step = FamilyStep(family.model, 3, place, "fp32", seed=7)
        losses[place] = [float(step(**batch)) for batch in family.batches]
    apart = deviation(losses[card], losses["cpu"])
    record_property("deviation", apart)
    # Other kernels than the CPU's; another mask moves a loss by a hundredth.
    assert apart < 2e-4
    assert torch.isfinite(torch.tensor(losses[card])).all()
