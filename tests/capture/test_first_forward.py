"""Models that set themselves up at their first forward, hooks and flags, need no second compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from transformers import LlamaConfig, LlamaForCausalLM

import zerograph as zg
from tests.harness import LossStep, compilations_of, forget_steps, inputs, mean_of_squares
from tests.models import output_of, update_by


class SetsUp(nn.Module):
    """At its first forward it hooks its layers, to collect what they return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).double()
        self.collected: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "_hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, given, out: self.collected.append(out))
            self._hooked = True
        for layer in self.layers:
            x = layer(x).relu()
        total = torch.stack(self.collected).sum() + x.sum()
        self.collected.clear()
        return total


class FirstIsAnother(SetsUp):
    """Its first forward computes something else than the later ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if getattr(self, "_hooked", False) else 2 * super().forward(x)


class Counts(SetsUp):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def training(model: nn.Module, loss: Callable[..., Tensor] = output_of, make: Any = torch.optim.SGD) -> LossStep:
    return LossStep(model, make(model.parameters(), lr=0.01), 0, loss, backend="eager")


def check(model: nn.Module) -> LossStep:
    """Three steps as plain PyTorch makes them."""
    plain, step = copy.deepcopy(model), training(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for x in inputs([4, 4, 4]):
        loss = update_by(optimizer, plain(x))
        torch.testing.assert_close(step(x), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.state_dict()["modules"]["model"], dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    return step


def test_hooks_that_the_first_forward_installs_need_no_second_compilation() -> None:
    model = SetsUp()
    assert compilations_of(check(model)) == 1
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1]


def test_a_first_forward_that_computes_something_else_is_compiled_by_itself() -> None:
    assert compilations_of(check(FirstIsAnother())) == 2


def test_a_count_that_the_graph_depends_on_is_compiled_in_every_step() -> None:
    model = Counts()
    assert compilations_of(check(model)) == 3
    assert model.calls == 3
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1]


def test_hooks_of_a_trace_that_failed_are_taken_away_with_the_flag() -> None:
    model = SetsUp()
    step = training(model)
    with pytest.raises(RuntimeError):
        step(torch.ones(2, 3, dtype=torch.float64))
    assert [len(layer._forward_hooks) for layer in model.layers] == [0, 0]
    assert not hasattr(model, "_hooked")


def loss_and_hidden_states(model: Any, ids: Tensor) -> Tensor:
    out = model(input_ids=ids, labels=ids, output_hidden_states=True, use_cache=False)
    loss: Tensor = out.loss + sum(one.square().mean() for one in out.hidden_states)
    return loss


def test_a_transformer_that_returns_hidden_states_is_compiled_once() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    step = training(LlamaForCausalLM(config), loss_and_hidden_states)
    ids = torch.randint(0, 17, (2, 5), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        step(ids)
    assert compilations_of(step) == 1


def test_the_notice_of_many_compilations_names_a_first_update_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 1)).double()

    step = training(model, lambda model, x: model(x).sum(), torch.optim.Rprop)
    (x,) = inputs([4])
    empty = step.state_dict()

    def compiled_anew() -> None:
        forget_steps(step)
        step(x)

    def in_turn() -> None:
        for _ in range(4):
            step.load_state_dict(empty)
            compiled_anew()
            compiled_anew()

    step(x)
    with pytest.warns(UserWarning, match="the first update of Rprop, which is computed in another way"):
        in_turn()


class Observed(nn.Module):
    """A layer whose weight is quantized per channel, or whose buffer gets its shape in the first forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.linear = kind, nn.Linear(3, 4)
        self.quantized = quantization.get_default_qat_qconfig("fbgemm").weight()
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.quantized(self.linear.weight) if self.kind == "quantized" else self.linear.weight
        if self.kind == "resized":
            with torch.no_grad():
                largest = x.amax(0)
                self.largest.resize_(largest.shape).copy_(largest)
        return nn.functional.linear(x, weight, self.linear.bias)


def loop_of(kind: str, prepare: Any) -> list[float]:
    model: nn.Module = Observed(kind)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [update_by(optimizer, model(x).square().mean()).item() for _ in range(3)]


@pytest.mark.parametrize("kind", ["quantized", "resized"])
def test_a_first_forward_that_reshapes_a_buffer_is_an_error_whose_advice_works(kind: str) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    step = training(Observed(kind), mean_of_squares)
    with pytest.raises(zg.CaptureError, match=r"another shape\n.*\nCall the model once on a batch before"):
        step(x)
    if kind == "quantized":
        step.model(x)
        assert torch.isfinite(step(x))
    # The first call of a loop runs as it is.
    assert loop_of(kind, zg.prepare) == pytest.approx(loop_of(kind, lambda *one: one))
