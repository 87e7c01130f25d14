"""Ranks that all pass the same batch: a warning, unless the tensors are marked as replicated."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zerograph as zg
from tests.compiler.test_plain_inputs import classes, linear, numbers, step_of
from tests.models import update_by
from tests.pool import Pool


def equal_batches(mark: Callable[[Tensor], Tensor], prepared: bool) -> tuple[list[float], list[str], list[str]]:
    """Losses of two steps of ranks that all pass the same batch; the warnings, and the files that they point at."""
    torch.manual_seed(0)
    model, x, y = linear(), mark(numbers(0, 8, 8)), mark(classes(8))
    with warnings.catch_warnings(record=True, action="always") as caught:
        if prepared:
            model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses = [update_by(optimizer, F.cross_entropy(model(x), y)) for _ in range(2)]
        else:
            step = step_of(model, lambda model, rows, target: F.cross_entropy(model(rows), target))
            losses = [step(x, y) for _ in range(2)]
        values = [loss.item() for loss in losses]
    about = [one for one in caught if "bitwise equal" in str(one.message)]
    return values, [str(one.message) for one in about], [one.filename for one in about]


@pytest.mark.parametrize("prepared", [False, True], ids=["graph", "loop"])
def test_equal_batches_on_all_ranks_are_warned_of_once_unless_they_are_marked(pool: Pool, prepared: bool) -> None:
    expected, silence, _ = equal_batches(same, False)
    assert not silence
    for losses, messages, files in pool.run(2, equal_batches, same, prepared):
        assert losses == pytest.approx(expected, rel=1e-5)
        (message,), (file,) = messages, files
        assert "args[0] is bitwise equal on all 2 ranks, and so are all inputs" in message
        assert "zg.replicated(args[0])" in message
        assert file == __file__
    for losses, messages, _ in pool.run(2, equal_batches, zg.replicated, prepared):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert not messages


def same(x: Tensor) -> Tensor:
    return x
