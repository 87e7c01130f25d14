"""``zg.check_rule`` accepts rules by which an operator computes in pieces what it computes whole, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
from zerograph.passes.rules.registry import rule_of


@torch.library.custom_op("tests_check_rule::normed", mutates_args=())
def normed(x: Tensor, scale: Tensor, power: float = 1.0) -> Tensor:
    return (x / x.abs().sum(1, keepdim=True)) @ scale * power


@normed.register_fake
def _(x: Tensor, scale: Tensor, power: float = 1.0) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[1]))


OPERATOR = torch.ops.tests_check_rule.normed.default
X, SCALE = torch.randn(4, 6), torch.randn(6, 8)

WRONG = {
    "channels may be split": ("n c, c k -> n k", ()),
    "linear in the rows": ("n c!, c! k -> n k", (0,)),
    "linear in both together": ("n c!, c! k -> n k", "all"),
}


def test_a_right_rule_is_accepted_and_kept() -> None:
    zg.register_rule(normed, "n c!, c! k -> n k", linear=(1,), check=(X, SCALE))
    zg.check_rule(normed, X, SCALE, power=2.0)
    zg.check_rule("tests_check_rule::normed", X.double(), SCALE.double(), ranks=4)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_an_error_that_names_the_split_and_the_rule_before_stays(name: str) -> None:
    notation, linear = WRONG[name]
    zg.register_rule(normed, "n! c!, c! k -> n! k")
    before = rule_of(OPERATOR)
    with pytest.raises(zg.ConfigError, match=r"is wrong: with inputs placed \(.*\) on 2 ranks"):
        zg.register_rule(normed, notation, linear=linear, check=(X, SCALE))  # type: ignore[arg-type]
    assert rule_of(OPERATOR) is before


def test_a_decorated_function_is_checked_too() -> None:
    with pytest.raises(zg.ConfigError, match="is wrong"):

        @zg.register_rule(normed, check=(X, SCALE))
        def split(operands: zg.Operands) -> str:
            return "n c, c k -> n k"


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        (torch.nn.functional.linear, (X, SCALE), "takes an operator and its arguments"),
        (torch.ops.aten.mm.default, (X, X), "takes an operator and its arguments"),
        (torch.ops.aten.rand_like.default, (X,), "cannot be tried|has no rule"),
        (torch.ops.aten.tanh.default, (torch.randn(3, 5),), "splits nothing of these shapes"),
        (torch.ops.aten.tanh.default, (X.to("meta"),), "a tensor on the meta device has none"),
    ],
)
def test_what_cannot_be_checked_is_an_error(operator: object, arguments: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(zg.ConfigError, match=message):
        zg.check_rule(operator, *arguments)


@pytest.mark.parametrize("ranks", [1, "2"])
def test_one_rank_cuts_nothing(ranks: Any) -> None:
    with pytest.raises(zg.ConfigError, match=r"ranks=.*give 2 or more"):
        zg.check_rule(torch.ops.aten.mm.default, X, SCALE, ranks=ranks)


@torch.library.custom_op("tests_check_rule::pieces", mutates_args=())
def pieces(x: Tensor, number: int) -> list[Tensor]:
    return [part.clone() for part in x.chunk(number, 1)]


def test_a_rule_that_names_too_few_results_says_so() -> None:
    with pytest.raises(zg.CaptureError, match="it names 1 outputs, there are 2"):
        zg.register_rule(pieces, "n c! -> n c!", check=(X, 2))


@pytest.mark.parametrize("name", ["mm", "addmm"])
def test_built_in_rules_pass(name: str) -> None:
    bias = (torch.randn(8),) if name == "addmm" else ()
    zg.check_rule(getattr(torch.ops.aten, name).default, *bias, X, SCALE)
