"""Operators of ``torch.library.triton_op`` inside ``build()``: traced through, as ``torch.compile`` does."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._library.triton import triton_ops_to_kernels

import zerograph as zg
from tests.harness import LossStep, Predict, prepare
from tests.models import part, update_by
from tests.pool import Pool

X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)


@torch.library.triton_op("zerograph_triton::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Subtract the mean over the batch, of which each rank has a part."""
    return x - x.mean(0)


@torch.library.triton_op("zerograph_triton::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(centred(x), weight).tanh()


@torch.library.triton_op("zerograph_triton::project_backward", mutates_args=())
def project_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    own = centred(x)
    inner = gradient * (1 - (own @ weight.T).tanh().square())
    return centred(inner @ weight), inner.T @ own


project.register_autograd(
    lambda context, gradient: project_backward(gradient, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.triton_op("zerograph_triton::gated", mutates_args=())
def gated(x: Tensor) -> Tensor:
    return x * x.sigmoid()


gated.register_autograd(
    lambda context, gradient: gradient * (context.gate + context.x * context.gate * (1 - context.gate)),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0], gate=inputs[0].sigmoid()),
)


@torch.library.triton_op("zerograph_triton::ruled", mutates_args=())
def ruled(x: Tensor) -> Tensor:
    return x * x.sigmoid()


zg.register_rule(ruled, "... -> ...")


@torch.library.triton_op("zerograph_triton::count_", mutates_args=("total",))
def count_(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum(0))


@torch.library.triton_op("zerograph_triton::with_value", mutates_args=())
def with_value(x: Tensor) -> Tensor:
    return x * x.sum().item()


@torch.library.triton_op("zerograph_triton::with_kernel", mutates_args=())
def with_kernel(x: Tensor) -> Tensor:
    # What wrap_triton() calls, which needs Triton.
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    triton_kernel_wrapper_mutation(
        kernel_idx=0, constant_args_idx=0, grid=[(1, 1, 1)], tma_descriptor_metadata={}, kwargs={"x": x}
    )
    return x.clone()


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight = nn.Linear(4, 4).double(), nn.Parameter(torch.randn(3, 4).double())
        self.register_buffer("total", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            count_(self.total, x)
        return project(x, self.weight).square().sum()


class CompiledInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Projected())
        self.scaled = torch.compile(lambda x: x * 0.5, fullgraph=True, dynamic=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.inner(x))


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Gated(nn.Module):
    """Without sums over the batch, which micro-batches would not have at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.first(x)).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "operators": Projected,
    "in a compiled module": CompiledInside,
    "with micro-batches": Gated,
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train() -> dict[tuple[str, int], tuple[list[Tensor], dict[str, Tensor], list[str]]]:
    """Return losses, state and messages of two steps of each model without ZeRO and at stage 3, on a rank."""
    results = {}
    for (name, make), stage in itertools.product(MODELS.items(), (0, 3)):
        model = make()
        micro_batches = 2 if make is Gated else 1
        step = LossStep(model, sgd(model), stage, gradient_accumulation_steps=micro_batches)
        with warnings.catch_warnings(record=True, action="always") as caught:
            losses = [step(part(X)) for _ in range(2)]
        said = [str(one.message) for one in caught if "rule" in str(one.message)]
        results[name, stage] = losses, step.state_dict()["modules"]["model"], said
    return results


def test_they_compute_with_and_without_zero_what_one_device_does(pool: Pool) -> None:
    first = pool.run(2, train)[0]
    for (name, _), (losses, state, said) in first.items():
        plain = MODELS[name]()
        optimizer = sgd(plain)
        wanted = [
            update_by(optimizer, plain.inner._orig_mod(X) * 0.5 if isinstance(plain, CompiledInside) else plain(X))
            for _ in range(2)
        ]
        assert said == [], name
        wanted_state = dict(zip(state, plain.state_dict().values(), strict=True))
        torch.testing.assert_close((losses, state), (wanted, wanted_state), rtol=1e-10, atol=1e-10)
        if name != "with micro-batches":
            # Stages 2 and 3 add micro-batches after ranks.
            torch.testing.assert_close((losses, state), first[name, 0][:2], rtol=0, atol=0)


def operators_of(step: zg.ZeroGraph, *batch: Tensor) -> set[str]:
    """Return the names of the operators in the graph of a prepared step."""
    return {str(node.target) for node in prepare(step, *batch).captured.graph.graph.nodes if node.op == "call_function"}


def test_an_operator_with_a_rule_stays_one_operator() -> None:
    assert "zerograph_triton.ruled.default" in operators_of(Predict(Calls(ruled)), X)


def test_an_operator_without_a_rule_is_that_of_its_function() -> None:
    assert operators_of(Predict(Calls(gated)), X) == {"aten.sigmoid.default", "aten.mul.Tensor"}


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (with_value, ["read a tensor's value", "x.sum().item()"]),
        (with_kernel, ["launches a kernel of Triton", 'zg.register_rule("zerograph_triton::with_kernel", ...)']),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), ["calls cond", "torch.where"]),
    ],
)
def test_what_no_graph_can_have_is_an_error_with_its_line(function: Callable[..., Tensor], parts: list[str]) -> None:
    with pytest.raises(zg.CaptureError) as error:
        prepare(Predict(Calls(function)), X)
    assert all(part in str(error.value) for part in [*parts, "test_triton_operators.py:"]), error.value


def test_an_operator_that_launches_kernels_of_triton_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where Triton is installed, torch lists the kernels of an operator here.
    monkeypatch.setitem(triton_ops_to_kernels, "zerograph_triton::gated", [object()])
    with pytest.warns(UserWarning, match="no rule says how zerograph_triton.gated.default"):
        operators = operators_of(Predict(Calls(gated)), X)
    assert operators == {"zerograph_triton.gated.default"}
