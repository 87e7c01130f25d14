"""Adapters on a base with weights in 8 bits, which stay so, are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep
from tests.models import update_by
from tests.pool import Pool
from zerograph.integrations.bitsandbytes import Int8Linear, use_plain_linears
from zerograph.runtime.state import stores_of


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(sizes[0], 2, bias=False), nn.Linear(2, sizes[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.base(x) + self.up(self.down(x))
        return total


def adapted(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Return two layers with adapters; the bias of the second one is trained."""
    torch.manual_seed(0)
    sizes = ((16, 24), (24, 8))
    first, second = (Adapted(make(nn.Linear(*size)), size) for size in sizes)
    first.base.bias.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), second)


def in_8_bits(linear: nn.Linear) -> nn.Module:
    weight = linear.weight.detach()
    scale = weight.abs().amax(1)
    return Int8Linear(torch.round(weight / scale[:, None] * 127).to(torch.int8), scale, linear.bias)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = adapted(in_8_bits)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.double()
    return model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)


def trained(stage: int) -> tuple[bool, int]:
    """Train on two ranks and in one process; return whether all is equal, and the bytes of this rank's 8-bit part."""
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, optimizer = model_and_optimizer()
    for _ in range(3):
        update_by(optimizer, loss_of(plain, x))
    model, optimizer = model_and_optimizer()
    step = LossStep(model, optimizer, stage, loss_of, backend="eager")
    for _ in range(3):
        step(x.chunk(2)[zg.rank()])
    state = step.state_dict()["modules"]["model"]
    torch.testing.assert_close(state, plain.state_dict(), rtol=0, atol=1e-12)
    with step.full_parameters():
        same = torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)
    part = sum(one.flat.nbytes for one in stores_of(model.parameters()) if one.layout.dtype == torch.int8)
    return same, part


def test_adapters_on_8_bit_weights_are_those_of_one_process(pool: Pool) -> None:
    part = (16 * 24 + 24 * 8) // 2
    assert pool.run(2, trained, 3) == [(True, part)] * 2


def test_backward_dequantises_weights_again() -> None:
    model, optimizer = model_and_optimizer()
    step = LossStep(model, optimizer, 3, loss_of)
    text = step.prepare(zg.mesh.line(2, 0, "ranks"), torch.zeros(4, 16, dtype=torch.float64)).text()
    lines = [line for line in text.splitlines() if "all-gather" in line and "i8" in line]
    assert [line.count("# backward") for line in lines] == [0, 1]


def test_layers_of_bitsandbytes_keep_their_values() -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

    def quantized(linear: nn.Linear, **options: Any) -> nn.Module:
        layer = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False, **options)
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    x = torch.randn(5, 3, 16)
    plain, model = adapted(quantized), use_plain_linears(adapted(quantized))
    for one in (plain, model):
        loss_of(one, x).backward()
    assert torch.equal(model(x), plain(x))
    trained = [[one.grad for one in module.parameters() if one.requires_grad] for module in (plain, model)]
    assert len(trained[0]) == 5
    # bitsandbytes flattens the rows before the product.
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)
    step = LossStep(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3, loss_of)
    with pytest.raises(zg.CaptureError, match="use_plain_linears"):
        step.prepare(zg.mesh.line(2, 0, "ranks"), x)
    dora = adapted(quantized)
    dora[0].base_layer, dora[0].lora_magnitude_vector = dora[0].base, nn.ModuleDict({"default": nn.Identity()})
    with pytest.raises(zg.ConfigError, match="DoRA"):
        use_plain_linears(dora)
    with pytest.raises(zg.ConfigError, match=r"0\.base is not quantized yet"):
        use_plain_linears(adapted(lambda one: bnb.nn.Linear8bitLt(16, 24, has_fp16_weights=False)))


def test_a_trainer_takes_a_base_in_8_bits(pool: Pool, tmp_path: Path) -> None:
    for name in ("bitsandbytes", "peft"):
        pytest.importorskip(name, reason=f"needs {name}: pip install {name}")
    from tests.integrations.test_transformers import assert_equal, run

    options = {"kinds": ["lora in 8 bits"]}
    expected = run("adapters", tmp_path / "plain", 1, None, options)["lora in 8 bits"]
    for logs in pool.run(2, run, "adapters", tmp_path / "zero", 2, 3, options):
        assert_equal(logs["lora in 8 bits"], expected)
