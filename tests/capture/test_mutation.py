"""A graph without mutation yields what the function yields, and leaves its arguments as the function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zerograph import _torch
from zerograph.ir import functionalize
from zerograph.ir.step_graph import writes

aten = torch.ops.aten

Function = Callable[[Tensor, Tensor], Any]


def in_turn(x: Tensor, y: Tensor) -> Tensor:
    before = x * 2
    x.add_(y).mul_(3)
    y.copy_(x + before)
    return x + y


def in_a_narrower_dtype(x: Tensor, y: Tensor) -> Tensor:
    made = x.to(torch.bfloat16)
    made.add_(y, alpha=0.5)
    return made + 1


def of_a_copy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    made = x.clone()
    made.masked_fill_(y > 0, 7.0)
    return made, x


def renamed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    other = x.detach()
    other.pow_(2)
    return x + y, other


def written_by_its_other_name(x: Tensor, y: Tensor) -> Tensor:
    other = x.detach()
    x.sub_(y)
    return other * 2


def seen_afterwards(x: Tensor, y: Tensor) -> Tensor:
    x.lerp_(y, 0.25)
    return x.view(-1)[::2] + x.t().reshape(-1)[::2]


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y[0])
    return x.sum()


def unread(x: Tensor, y: Tensor) -> Tensor:
    x.zero_()
    y.fill_(2.0)
    return torch.ones(3)


def parts_of_one(x: Tensor, y: Tensor) -> Tensor:
    first, second = (x * y).unsafe_chunk(2)
    return first.exp_() + second + y[:2]


def seen_before(x: Tensor, y: Tensor) -> Tensor:
    flat = x.view(-1)
    x.add_(y)
    return flat * 2


def through_a_part(x: Tensor, y: Tensor) -> Tensor:
    x[1:].add_(1)
    x[0, 0] = 5
    return x * y


def through_one_of_several(x: Tensor, y: Tensor) -> Tensor:
    first, second = x.chunk(2)
    first.add_(second)
    return x * y


def turned(x: Tensor, y: Tensor) -> Tensor:
    made = x + y
    made.t_()
    return made.add_(y)


def with_other_strides(x: Tensor, y: Tensor) -> Tensor:
    made = torch.empty_like(x).t()
    made.copy_(y)
    return made + made.sigmoid_()


DIRECT = [in_turn, of_a_copy, renamed, written_by_its_other_name, seen_afterwards, broadcast, unread, parts_of_one]
TRACED_AGAIN = [in_a_narrower_dtype, seen_before, through_a_part, through_one_of_several, turned, with_other_strides]


def check(function: Function) -> None:
    torch.manual_seed(0)
    given = torch.randn(4, 4), torch.randn(4, 4)
    with _torch.fake_mode():
        fakes = [torch.empty(4, 4), torch.empty(4, 4)]
        graph = functionalize.without_mutation(_torch.trace(function, fakes))
    changing = [node for node in graph.graph.nodes if _torch.written_arguments(node)]
    assert changing == [node for node, _, _ in writes(graph.graph)]
    graph.recompile()
    expected, found = [tensor.clone() for tensor in given], [tensor.clone() for tensor in given]
    torch.testing.assert_close(graph(*found), function(*expected), rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", DIRECT)
def test_writes_to_whole_tensors_cost_no_second_trace(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "functional_trace", lambda *_: pytest.fail("traced again"))
    check(function)


@pytest.mark.parametrize("function", TRACED_AGAIN)
def test_others_are_traced_again(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, again = [], _torch.functional_trace

    def counted(*args: Any) -> Any:
        calls.append(args)
        return again(*args)

    monkeypatch.setattr(_torch, "functional_trace", counted)
    check(function)
    assert len(calls) == 1


def test_a_graph_that_writes_nothing_stays() -> None:
    with _torch.fake_mode():
        graph = _torch.trace(lambda x: x.t() + 1, [torch.empty(4, 4)])
        assert functionalize.without_mutation(graph) is graph


def test_forms_are_found_by_what_they_take() -> None:
    """Two forms of one computation may have other overload names, and two of one name may compute other things."""
    assert _torch.in_place_overload(aten.pow.Tensor_Scalar) is aten.pow_.Scalar
    assert _torch.in_place_overload(aten.pow.Scalar) is None  # a number to the power of a tensor
    assert _torch.functional_overload(aten.pow_.Scalar) is aten.pow.Tensor_Scalar
    assert _torch.in_place_overload(aten.add.Tensor) is aten.add_.Tensor
    assert _torch.functional_overload(aten.add.Tensor) is None


def test_only_what_shares_memory_with_a_write_is_traced_again() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        made = (x * y).exp()
        x[1:].add_(made[1:])
        return made.sin()

    with _torch.fake_mode():
        traced = _torch.trace(function, [torch.empty(4, 4), torch.empty(4, 4)])
        values = {id(node.meta["val"]): node for node in traced.graph.nodes if node.op == "call_function"}
        graph = functionalize.without_mutation(traced).graph
    copied = [values[id(node.meta["val"])].name for node in graph.nodes if id(node.meta.get("val")) in values]
    assert copied == ["mul", "exp", "slice_2", "sin"]
