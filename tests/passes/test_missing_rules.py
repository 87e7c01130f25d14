"""Operators without a rule: gathered with a warning, refused, tried out, or given a rule by the user."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import optimizer_of, stores_of
from tests.models import part, update_by
from tests.passes.samples import ints, x
from tests.passes.test_rules import graph_of
from tests.pool import Pool
from zerograph.passes import rules
from zerograph.passes.rules.discover import discover
from zerograph.passes.rules.registry import register_user_rule

aten = torch.ops.aten


@torch.library.custom_op("zg_tests::squash", mutates_args=())
def squash(x: Tensor, weight: Tensor) -> Tensor:
    """x W / (1 + |x W|): rows are free, and so are columns of W."""
    out = x @ weight
    return out / (1 + out.abs())


@squash.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("zg_tests::squash_backward", mutates_args=())
def squash_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    inner = grad / (1 + (x @ weight).abs()).square()
    return inner @ weight.T, x.T @ inner


@squash_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


squash.register_autograd(
    lambda ctx, grad: squash_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Step(zg.ZeroGraph):
    def __init__(self, policy: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6, bias=False).double(), nn.Linear(6, 3).double()
        self.add_optimizer(torch.optim.SGD([*self.first.parameters(), *self.second.parameters()], lr=0.5))
        self.set_zero_mode("distributed_split", stage=2)
        self.config.checks.on_missing_rule = policy

    def build(self, x: Tensor) -> Tensor:
        loss = self.second(squash(x, self.first.weight.t())).square().mean()
        loss.backward()
        return loss


def batch() -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plainly() -> list[Tensor]:
    step = Step("gather")
    # The graph's guard concerns only its own state.
    optimizer = optimizer_of(step)
    losses = [
        update_by(optimizer, step.second(squash(batch(), step.first.weight.t())).square().mean()) for _ in range(3)
    ]
    return [*losses, step.first.weight.detach()]


def trained(policy: str, rule: bool = False) -> tuple[list[Tensor], list[str], list[str]]:
    """Losses and a weight after three steps, warnings, and the kinds of the collectives that move activations."""
    if rule:
        zg.register_rule(squash, "n i!, i! o -> n o")
        zg.register_rule(squash_backward, "n o, n i, i o -> n i, i o")
    step = Step(policy)
    with warnings.catch_warnings(record=True, action="always") as caught:
        losses = [step(part(batch())) for _ in range(3)]
    values = [*losses, step.state_dict()["modules"]["first"]["weight"]]
    moved = [one.kind for one in step.inspect.collectives() if not one.tensors[0].startswith(("first", "second"))]
    return values, [str(one.message) for one in caught if "rule" in str(one.message)], moved


def check(values: list[Tensor]) -> None:
    for one, other in zip(values, plainly(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_inputs_are_gathered_with_one_warning_an_operator(pool: Pool) -> None:
    values, messages, moved = pool.run(2, trained, "gather")[0]
    check(values)
    assert "all-gather" in moved
    assert len(messages) == 2
    # The whole input is 8 x 5 fp64; each of two ranks lacks, and sends, half of it.
    assert "zg_tests.squash.default" in messages[0]
    assert "160 bytes per step" in messages[0]
    assert "test_missing_rules.py" in messages[0]
    assert "squash(x, self.first.weight.t())" in messages[0]


def refused() -> tuple[str, bool]:
    step = Step("error")
    with pytest.raises(zg.CaptureError) as error:
        step(part(batch()))
    return str(error.value), type(step.first.weight) is nn.Parameter and not stores_of(step)


def test_or_refused_before_any_state_changes(pool: Pool) -> None:
    for message, unchanged in pool.run(2, refused):
        assert all(word in message for word in ("zg_tests.squash.default", "160 bytes", "squash(x,", "register_rule"))
        assert unchanged


def test_or_split_as_was_found_by_trying(pool: Pool) -> None:
    values, messages, moved = pool.run(2, trained, "discover")[0]
    check(values)
    assert not messages
    assert moved == ["all-reduce"], "nothing moves but the loss"


def test_or_split_as_the_user_says(pool: Pool) -> None:
    values, messages, moved = pool.run(2, trained, "error", True)[0]
    check(values)
    assert not messages
    assert moved == ["all-reduce"]


def tried(node: Any) -> Any:
    inputs = [given.meta["val"] for given in rules.tensor_arguments(node)]
    return discover(node, 2, inputs, rules.output_values(node), {})


def shown(found: Any) -> set[str]:
    return {f"{', '.join(map(str, one.inputs))} -> {', '.join(map(str, one.outputs))}" for one in found}


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.mm.default, (x(4, 6), x(6, 8))),
        (aten._softmax.default, (x(4, 6), 1, False)),
        (aten.add.Tensor, (x(4, 6), x(6))),
        (aten.sum.dim_IntList, (x(4, 6), [1])),
        (aten.embedding.default, (x(8, 4), ints(2, 6))),
        (aten.native_layer_norm.default, (x(4, 6), [6], x(6), x(6), 1e-5)),
        (aten.exp.default, (x(4, 7),)),
    ],
)
def test_trying_finds_what_the_rule_says(operator: Any, args: Any) -> None:
    _, node, _ = graph_of(operator, args, {})
    said, found = rules.signatures_of(node, 2), tried(node)
    assert said is not None
    assert found is not None
    assert shown(said) <= shown(found)
    # Beyond that only splits along indices whose size another one shares could hold; here there are none.
    extra = {one for one in shown(found) - shown(said) if "P" not in one.split("->")[0]}
    assert not extra


def test_layers_of_equal_shapes_are_tried_once() -> None:
    known: dict[str, Any] = {}
    found = []
    for shape in ((4, 6), (4, 6), (8, 6)):
        _, node, _ = graph_of(aten.exp.default, (x(*shape),), {})
        found.append(discover(node, 2, [x(*shape)], rules.output_values(node), known))
    assert found[0] is found[1]
    assert len(known) == 2


@torch.library.custom_op("zg_tests::awkward", mutates_args=())
def awkward(x: Tensor, kind: int) -> Tensor:
    """Zero for all usual numbers, random, or refused."""
    if kind == 2:
        raise ValueError("no")
    return torch.relu(x - 100) if kind == 0 else x + torch.rand_like(x)


@awkward.register_fake
def _(x: Tensor, kind: int) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_what_cannot_be_tried_is_not_guessed(kind: int) -> None:
    _, node, _ = graph_of(torch.ops.zg_tests.awkward.default, (x(4, 6), kind), {})
    assert tried(node) is None


@torch.library.custom_op("zg_tests::joined", mutates_args=())
def joined(tensors: list[Tensor], scale: float) -> Tensor:
    return torch.cat(tensors) * scale


@pytest.mark.parametrize(
    ("operator", "notation", "options", "words"),
    [
        (aten.mm.default, "m k, k n -> m n", {}, ["aten.mm.default has a rule already"]),
        (squash, "n i, i o -> n o, n", {}, ["names 2 outputs"]),
        (squash, "n i, i o -> n o", {"linear": (2,)}, ["linear=(2,)", "0 to 1"]),
        (joined, "n -> n", {}, ["list of tensors", "function"]),
    ],
)
def test_a_rule_that_cannot_be_right_is_refused(operator: Any, notation: str, options: Any, words: list[str]) -> None:
    with pytest.raises(zg.ConfigError) as error:
        zg.register_rule(operator, notation, **options)
    assert all(word in str(error.value) for word in words), error.value


_names = itertools.count()


@pytest.mark.parametrize(
    ("notation", "words"),
    [
        ("n i, i o -> n i", ["'n i, i o -> n i'", "i is 8 and 6"]),
        ("n i c, i o -> n o", ["'n i c'", "(4, 6)"]),
        ("n i, i ? -> n o", ["'i ?'", "factors"]),
        ("n i -> n o", ["names 1 inputs, there are 2"]),
    ],
)
def test_a_rule_that_does_not_fit_is_named(notation: str, words: list[str]) -> None:
    name = f"zg_tests::fit{next(_names)}"
    own = torch.library.custom_op(name, squash._init_fn, mutates_args=())
    own.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))
    overload = getattr(torch.ops.zg_tests, name.split("::")[1]).default
    zg.register_rule(own)(lambda operands: notation)
    _, node, _ = graph_of(overload, (x(4, 6), x(6, 8)), {})
    with pytest.raises(zg.CaptureError) as error:
        rules.signatures_of(node, 2)
    assert all(word in str(error.value) for word in (str(overload), *words)), error.value
    register_user_rule(overload, "n i, i o -> n o", ())
    assert "S(0), B -> S(0)" in shown(rules.signatures_of(node, 2) or ())


def example() -> float:
    spec = importlib.util.spec_from_file_location(
        "custom_operator", Path(__file__).parents[2] / "examples" / "custom_operator.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: float = module.main()
    return result


def test_the_example_of_a_custom_operator_computes_the_same_on_two_ranks(pool: Pool) -> None:
    assert pool.run(2, example) == [pytest.approx(example(), rel=1e-5)] * 2
