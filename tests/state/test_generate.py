"""``step.generate()`` gives the tokens of ``model.generate()`` in one process, from sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zerograph as zg
from tests import pretrained
from tests.harness import LossStep, sliced
from tests.models import update_by
from tests.pool import Pool
from zerograph.runtime.parameters import SplitParameter

# Of the whole batch; the ranks have three rows and one. Token 0 is for padding.
PROMPTS = [[5, 6, 7], [9, 11, 13, 15, 17, 19], [3], [20, 21, 22, 23]]
ROWS = (slice(0, 3), slice(3, 4))
NEW = 6


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def step_of(model: Any, **options: Any) -> LossStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LossStep(model, optimizer, 3, loss_of, backend="eager", bucket_size=20_000, **options)


def padded(rows: list[list[int]], left: bool) -> tuple[Tensor, ...]:
    side = "left" if left else "right"
    ids, ones = [torch.tensor(row) for row in rows], [torch.ones(len(row), dtype=torch.int64) for row in rows]
    return tuple(nn.utils.rnn.pad_sequence(values, batch_first=True, padding_side=side) for values in (ids, ones))


def new_tokens(tokens: Tensor, model: Any) -> list[list[int]]:
    """Return the tokens of each row up to the end, without padding."""
    begin = 1 if model.config.is_encoder_decoder else -NEW
    rows = tokens[:, begin:].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


def plainly(model: Any) -> list[list[int]]:
    """Generate for the whole batch in one process; pad so that all rows have as many tokens."""
    model = model.eval()
    ids, mask = padded(PROMPTS, left=not model.config.is_encoder_decoder)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    length = NEW + (1 if model.config.is_encoder_decoder else ids.shape[1])
    return new_tokens(nn.functional.pad(tokens, (0, length - tokens.shape[1])), model)


def generated(step: zg.ZeroGraph, model: Any, rows: list[list[int]]) -> list[list[int]]:
    tokens = step.generate(model, rows, max_new_tokens=NEW, do_sample=False)
    length = NEW + (1 if model.config.is_encoder_decoder else max(map(len, rows), default=0))
    return new_tokens(nn.functional.pad(tokens, (0, length - tokens.shape[1])), model)


def generate(names: Sequence[str]) -> dict[str, bool]:
    """Return for each family and way whether the tokens of this rank's rows are those of one process."""
    same = {}
    for name in names:
        # torch.nn.functional.grouped_mm, which runs experts, has no fp64.
        dtype = torch.float32 if name == "mixtral" else torch.float64
        expected = plainly(pretrained.make(name).to(dtype))
        with zg.sharded_init():
            model = pretrained.make(name).to(dtype)
        model.train()
        rows = ROWS[zg.rank()]
        for way, budget in (("gathered once", None), ("in units", 1)):
            step = step_of(model, memory_budget=budget)
            same[f"{name}, {way}"] = generated(step, model, PROMPTS[rows]) == expected[rows]
            split = all(isinstance(parameter, SplitParameter) for parameter in model.parameters())
            same[f"{name}, {way}, as before"] = split and model.training
        # Rank 0 has no rows, which the other does not wait for.
        found = generated(step, model, PROMPTS if zg.rank() else [])
        same[f"{name}, no rows"] = found == (expected if zg.rank() else [])
    return same


@sliced("names", [("llama", "t5")], [tuple(pretrained.FAMILIES)])
def test_tokens_are_those_of_one_process(pool: Pool, names: tuple[str, ...]) -> None:
    for same in pool.run(2, generate, names):
        assert all(same.values()), [name for name, value in same.items() if not value]


def between_steps() -> list[bool]:
    """Generate before and after an update, which changes the tokens, and compare with one process."""
    torch.manual_seed(0)
    ids = torch.randint(3, 61, (4, 8))
    model, plain = pretrained.make("llama").double(), pretrained.make("llama").double()
    step = step_of(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    same, seen = [], []
    for _ in range(2):
        step(ids.chunk(2)[zg.rank()])
        update_by(optimizer, loss_of(plain, ids))
        for budget in (None, 1):
            # After the step is compiled: a budget that small would not fit.
            step.config.memory.memory_budget = budget
            found = step.generate(step.model, ids, max_new_tokens=NEW, do_sample=False)
            same.append(torch.equal(found, plain.generate(ids, max_new_tokens=NEW, do_sample=False)))
        step.config.memory.memory_budget = None
        seen.append(found)
    return [*same, not torch.equal(*seen)]


def test_tokens_follow_the_updates(pool: Pool) -> None:
    assert pool.run(2, between_steps) == [[True] * 5] * 2


class Raising(transformers.LogitsProcessor):
    """Raise on rank 1 at the third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if zg.rank() and self.calls == 3:
            raise ValueError("from the user's processor")
        return scores


def refused() -> tuple[dict[str, str], bool]:
    """Return the error of each wrong call, and whether a right one succeeds after all of them."""
    ids = torch.arange(3, 11).view(1, 8)
    fresh = step_of(pretrained.make("gpt2"))
    with zg.sharded_init():
        model = pretrained.make("llama")
    step, units = step_of(model), step_of(model, memory_budget=1)
    encoder = LossStep(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    calls: dict[str, Any] = {
        "before the first step": lambda: fresh.generate(fresh.model, ids),
        "another model": lambda: step.generate(fresh.model, ids),
        "no generate": lambda: encoder.generate(encoder.model, ids),
        "other arguments": lambda: step.generate(model, ids, max_new_tokens=4 + zg.rank()),
        "transformers refuses": lambda: step.generate(model, ids, no_such_option=1),
        "the user's error": lambda: step.generate(model, ids, max_new_tokens=5, logits_processor=[Raising()]),
        "the user's error in units": lambda: units.generate(model, ids, max_new_tokens=5, logits_processor=[Raising()]),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((zg.ZeroGraphError, ValueError)) as error:
            call()
        found[name] = f"{error.type.__name__}: {error.value}"
    # A mask of ones is the default; ranks need not agree on tensors.
    mask: dict[str, Any] = {"attention_mask": torch.ones_like(ids)} if zg.rank() else {}
    right = step.generate(model, ids, max_new_tokens=2, **mask), units.generate(model, ids, max_new_tokens=2)
    return found, torch.equal(*right)


def test_wrong_calls_are_errors_on_all_ranks_and_change_nothing(pool: Pool) -> None:
    results = pool.run(2, refused)
    for rank, (found, right) in enumerate(results):
        assert right
        assert found["before the first step"].startswith("ConfigError: generate() before the first step")
        assert found["another model"].startswith("ConfigError: generate() takes a module of the graph")
        assert found["no generate"].startswith("ConfigError: Linear has no generate()")
        assert "max_new_tokens" in found["other arguments"]
        assert "no_such_option" in found["transformers refuses"]
        for name in ("the user's error", "the user's error in units"):
            assert "from the user's processor" in found[name]
            assert found[name].startswith("ValueError" if rank else "RankMismatchError: rank 1 failed")
