"""Sizes that change between calls: how often a step is compiled, which sizes it serves, and what says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.compiler.test_any_batch import own
from tests.harness import LossStep, compilations_of, sliced
from tests.models import TrainStep, adam_step, adamw, make, update_by
from tests.pool import Pool
from zerograph import _torch
from zerograph.ir.mesh import line


def sizes_compiled(sizes: list[int], mode: Any) -> int:
    step = adam_step("gpt_of_one_block", dynamic_shapes=mode)
    for size in sizes:
        x = torch.randint(0, 61, (4, size + 1))
        step(x[:, :-1].contiguous(), x[:, 1:].contiguous())
    return compilations_of(step)


@sliced("mode, compilations", [("auto", 2), (True, 1)], [(False, 4)])
def test_a_second_size_compiles_once_more_and_no_further_size_does(mode: Any, compilations: int) -> None:
    assert sizes_compiled([12, 5, 9, 7, 5], mode) == compilations


def long_or_short(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() if x.shape[0] > 6 else model(x).square().sum()


def test_a_branch_on_a_size_is_a_guard_with_a_step_for_each_outcome() -> None:
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, long_or_short)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in (4, 5, 9, 3, 12, 6, 7):
        x = torch.randn(rows, 3)
        loss = update_by(optimizer, long_or_short(plain, x))
        torch.testing.assert_close(step(x), loss)
    assert compilations_of(step) == 3


CALLS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.view(-1, 4, 3),
    lambda x: x.reshape(x.shape[0] * 12),
    lambda x: x.t(),
    lambda x: x[1:, 2:5],
    lambda x: x.expand(3, -1, -1),
    lambda x: x.view(torch.int32),
    lambda x: x.split(5, dim=1),
    lambda x: x.unbind(1),
    lambda x: x @ x.t(),
    lambda x: x.sum(0) + 1,
    lambda x: x.long() / 2,
    lambda x: torch.nn.functional.layer_norm(x, (12,)),
    # Has storage of its own, with an offset.
    lambda x: torch.ops.aten.copy(x[:, 1:], x[:, :-1]),
)


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_cached_fake_result_is_what_the_operator_returns(call: Callable[[Tensor], Any], symbolic: bool) -> None:
    mode = _torch.fake_mode()
    cache, mode.fake_results = mode.fake_results, None
    with mode:
        rows = _torch.new_size(_torch.size_env(mode), "s0", 8, minimum=2) if symbolic else 8
        x = torch.empty(rows, 12)
        computed = described(call(x), x)
        mode.fake_results = cache
        assert described(call(x), x) == computed
        assert described(call(x), x) == computed


def described(results: Any, x: Tensor) -> list[str]:
    descriptions = []
    for one in [results] if isinstance(results, Tensor) else results:
        storage = one.untyped_storage()
        shared, size = storage._cdata == x.untyped_storage()._cdata, _torch.size_hint(storage.nbytes())
        descriptions.append(
            f"{one.shape} {one.stride()} {one.storage_offset()} {one.dtype} {one.device} {size} {shared}"
        )
    return descriptions


class Positions(nn.Module):
    """Adds a table of positions to rows of at most 16 numbers, as BERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.table[None, : x.shape[1]]


def test_a_symbolic_length_may_reach_the_end_of_a_table_of_positions() -> None:
    model = Positions()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 0, lambda model, x: model(x).sum())
    for length in (13, 16, 12, 15):
        x = torch.randn(2, length)
        torch.testing.assert_close(step(x), model(x).sum().detach())
    assert compilations_of(step) == 2


def each_row(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([model(x[row]).sum() for row in range(x.shape[0])]).sum()


def test_a_loop_over_a_size_compiles_each_size_and_is_named_at_the_third_and_the_eighth() -> None:
    model = nn.Linear(3, 2)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 0, each_row)
    messages = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for rows in range(2, 12):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(step(x), each_row(model, x).detach())
        messages = [str(warning.message) for warning in caught if "cannot be symbolic" in str(warning.message)]
    third, eighth = messages
    assert "each of the last 3 new sizes" in third
    assert "for the 8th time because of sizes alone" in eighth
    for message in messages:
        assert "dimension 0 of args[0] (s0) cannot be symbolic, because build() needs it as a Python number" in message
        assert "test_dynamic_sizes.py" in message
        assert "for row in range(x.shape[0])" in message


def loop_over_rows_of_ranks() -> tuple[list[Tensor], str, str]:
    """Return differences from plain PyTorch for equal parts, and messages for unequal ones and for too few rows."""
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 2, each_row)
    differences = []
    with warnings.catch_warnings(action="ignore"):
        for rows in [(3, 3), (2, 2)]:
            x = torch.randn(sum(rows), 3)
            differences.append((step(own(rows, x)) - each_row(plain, x)).abs().detach())
    with pytest.raises(zg.InputError) as caught:
        step(own((3, 1), torch.randn(4, 3)))
    asking = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 0, for_few_rows)
    with warnings.catch_warnings(action="ignore"), pytest.raises(zg.InputError) as few:
        asking(own((2, 0), torch.randn(2, 3)))
    return differences, str(caught.value), str(few.value)


def for_few_rows(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() * (2 if x.shape[0] // 2 >= 2 else 1)


def test_a_loop_over_the_rows_of_several_ranks_needs_equal_parts(pool: Pool) -> None:
    for differences, message, few in pool.run(2, loop_over_rows_of_ranks):
        assert max(differences) < 1e-5
        assert "what is computed depends on the batch having 2 rows, too few for 2 ranks" in few
        assert "ranks hold unequal numbers of rows, and the step has equal parts only" in message


def test_marked_dimensions_are_symbols_in_the_text_and_memory_is_that_of_the_maximum() -> None:
    def prepared(limit: int) -> Any:
        model = make("gpt_of_one_block")
        x, y = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
        for tensor in (x, y):
            zg.mark_dynamic(tensor, 0, max=limit)
            torch._dynamo.mark_dynamic(tensor, 1)
        return TrainStep(model, adamw(model), 2).prepare(line(2, 0, "ranks"), x, y)

    small, large = prepared(8), prepared(80)
    assert "(s0, s1) -> (s0_rows, s1)" in small.text()
    assert "s0_rows  rows of this rank, of s0" in small.text()
    assert large.memory.peak > small.memory.peak
    assert isinstance(large.memory.peak, int)
    assert "bytes are for s0 <= 16 (declared), s0_rows <= 8 (declared), s1 <= 8 (seen)" in small.page()
    assert all(type(facts["bytes"]) is int for _, facts in small.to_networkx("place").nodes(data=True))
    with pytest.raises(zg.ConfigError, match="s0_rows is a size"):
        small.explain("s0_rows")


def test_a_plan_is_for_the_declared_maximum() -> None:
    def planned(size: int, *, mark: bool) -> zg.Plan:
        model = make("gpt_of_one_block")
        x, y = torch.zeros(size, 8, dtype=torch.long), torch.zeros(size, 8, dtype=torch.long)
        for tensor in (x, y) if mark else ():
            zg.mark_dynamic(tensor, 0, max=12)
        return zg.plan(TrainStep(model, adamw(model), 2), (x, y), world_size=2)

    symbolic, static = planned(3, mark=True), planned(12, mark=False)
    assert "all numbers are for inputs of s0 <= 24 (declared), s0_rows <= 12 (declared)" in str(symbolic)
    assert (symbolic.samples, symbolic.tokens, symbolic.operations) == (12, 96, static.operations)
    assert symbolic.memory.peak == pytest.approx(static.memory.peak, rel=0.01)


def test_a_compiling_backend_gets_static_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, lambda model, x: model(x).sum())
    step.config.backend = lambda graph, inputs: graph.forward
    for rows in (4, 5, 6, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(step(x), model(x).sum().detach(), atol=10.0, rtol=1.0)
    assert compilations_of(step) == 3
