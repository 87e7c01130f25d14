"""Code that cannot be one graph, or would mean another thing on the whole batch, is refused on the user's line.

Two calls to an update make two parts of the batch, on one process as two ranks would.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.compat.colossalai.loops import PLAIN, engine_of
from tests.models import batches, make, part
from tests.pool import Pool
from zerograph.compat import colossalai

X, Y = batches("mlp", 1)[0]


@pytest.fixture
def engine() -> colossalai.Engine:
    return engine_of(make("mlp"), zero={"level": 2, "gradient_accumulation_steps": 2})


def unquoted(message: object) -> str:
    """Return a message without the indented line that quotes this file, patterns included."""
    return "\n".join(line for line in str(message).splitlines() if not line.startswith("  "))


def written(out: Tensor) -> None:
    out[:, 0] = 1


OPERATORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a literal size": (lambda out: out.view(8, -1), "splits the batch dimension"),
    "some samples": (lambda out: out[:4], "picks samples"),
    "samples by number": (lambda out: out[torch.arange(8), Y], "picks samples"),
    "half the batch": (lambda out: out.chunk(2), "picks samples"),
    "sample by sample": (lambda out: list(out), "different number of results"),
    "samples by value": (lambda out: out[out[:, 0] > 0], "multiply by a mask"),
    "a size by value": (lambda out: out.nonzero(), "needs values"),
    "two batches": (lambda out: torch.cat([out, out]), "concatenates batches"),
    "copies": (lambda out: out.repeat(2, 1), "repeats the batch"),
    "pairs of samples": (lambda out: out @ out.T, "compares samples"),
    "another order": (lambda out: out.T.reshape(-1), "splits the batch dimension"),
    "in place": (lambda out: out.add_(1), "in place"),
    "in place by +=": (lambda out: out.__iadd__(1), "in place"),
    "in place by index": (written, "in place"),
    "in place in a function": (lambda out: F.relu(out, inplace=True), "in place"),
    "into another": (lambda out: torch.zeros(8, 3).copy_(out), "in place"),
    "into a total": (lambda out: torch.zeros(()).add_(out.mean().detach()), r"after engine\.step"),
    "a masked mean": (lambda out: out.sum() / (Y > 1).sum(), r"engine\.criterion\(output, y, mask\)"),
    "a masked mean of samples": (lambda out: out.sum(0) * (1 / (Y > 1).sum()), r"engine\.criterion\(output, y, mask\)"),
    "another engine's": (lambda out: engine_of(nn.Linear(3, 3))(out), "results of two engines"),
    "a penalty by hand": (lambda out: out.mean() + nn.Linear(7, 3).weight.square().sum(), "belongs into the criterion"),
    "backward by hand": (lambda out: out.mean().backward(), r"engine\.backward\(loss\)"),
    "backward by torch": (lambda out: torch.autograd.backward(out.mean()), r"engine\.backward\(loss\)"),
    "gradients": (lambda out: torch.autograd.grad(out.mean(), [X]), "inside the step only"),
    "hooks": (lambda out: out.register_hook(print), "inside the step only"),
    "data": (lambda out: setattr(out, "data", X), "is set on"),
    "an exchange": (lambda out: torch.distributed.all_reduce(out.mean()), "losses are those of the whole batch"),
    "a gradient from outside": (lambda out: out + nn.Linear(7, 3)(X), "requires a gradient"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_the_step_cannot_repeat_is_refused_with_its_line(engine: colossalai.Engine, name: str) -> None:
    operator, message = OPERATORS[name]
    out = engine(X)
    with pytest.raises((zg.CaptureError, zg.InputError)) as caught:
        operator(out)
    assert "test_mistakes.py:" in str(caught.value)
    assert re.search(message, unquoted(caught.value))


def test_the_loop_goes_on_after_a_mistake(engine: colossalai.Engine) -> None:
    with pytest.raises(zg.CaptureError):
        engine(X)[:4]
    for _ in range(2):
        engine.backward(engine.criterion(engine(X), Y))
        updated = engine.step()
    assert updated


def test_a_forward_that_only_the_garbage_collector_can_reach_is_no_part_of_an_update(engine: colossalai.Engine) -> None:
    gc.disable()
    try:
        held: list[Any] = [engine(X)]
        held.append(held)
        del held
        for _ in range(2):
            engine.backward(engine.criterion(engine(X), Y))
            updated = engine.step()
    finally:
        gc.enable()
    assert updated


def test_a_size_that_fits_one_part_only_says_so(engine: colossalai.Engine) -> None:
    with pytest.raises(zg.CaptureError, match=r"not the whole batch(.|\n)*use -1"):
        engine(X).view(8, 3)


MEANS_BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by 8": lambda out: F.cross_entropy(out, Y, reduction="sum") / len(X),
    "divided by 8.0": lambda out: out.sum() / float(len(X)),
    "multiplied by 0.125": lambda out: (1 / len(X)) * (0.5 * out.sum()),
    "summed over the batch was divided": lambda out: (F.cross_entropy(out, Y, reduction="none") / len(X)).sum(),
}


@pytest.mark.parametrize("message", MEANS_BY_HAND)
def test_a_sum_over_the_samples_of_one_rank_is_warned_of(engine: colossalai.Engine, message: str) -> None:
    with pytest.warns(UserWarning, match="a sum|summed") as seen:
        MEANS_BY_HAND[message](engine(X))
    assert seen[0].filename == __file__
    assert any(message in unquoted(one.message) for one in seen)


def test_means_are_scaled_without_a_warning(engine: colossalai.Engine) -> None:
    out = engine(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = F.cross_entropy(out, Y) / 2 + 0.5 * out.mean() * torch.tensor(2.0) + (out.sum() / (out > 0).sum()) / 4
        engine.backward(loss + 0.5 * engine.criterion(out, Y) / 2)


def test_a_sum_that_the_criterion_returns_is_warned_of() -> None:
    def summed(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none").sum()

    engine = engine_of(make("mlp"), summed, gradient_accumulation=2)
    with pytest.warns(UserWarning, match="a sum is divided by 5"):
        engine.criterion(engine(X), Y) / 5


def test_what_was_taken_for_the_batch_is_named() -> None:
    def weighted(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight)

    engine = engine_of(make("mlp"), weighted, gradient_accumulation=2)
    out = engine(X)
    with pytest.raises(zg.CaptureError, match=r"argument 3 of shape \(3,\) was taken(.|\n)*attribute of the criterion"):
        engine.criterion(out, Y, torch.ones(3))


def test_as_many_classes_as_samples_are_told_apart() -> None:
    model, weight = nn.Linear(7, 8), torch.arange(1.0, 9.0)
    wanted = F.cross_entropy(model(torch.cat([X, X])), torch.cat([Y, Y]), weight)
    engine = engine_of(model, gradient_accumulation=2)
    losses = []
    for _ in range(2):
        losses.append(F.cross_entropy(engine(X), Y, weight))
        engine.backward(losses[-1])
        engine.step()
    torch.testing.assert_close(losses[0], wanted.detach())


def test_autocast_around_the_engine_is_refused(engine: colossalai.Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(zg.CaptureError, match="as its configuration says"):
        engine(X)


def test_step_needs_backward(engine: colossalai.Engine) -> None:
    engine(X)
    with pytest.raises(zg.InputError, match=r"without engine\.backward"):
        engine.step()


def test_a_step_that_is_forgotten_is_warned_of_once(engine: colossalai.Engine) -> None:
    def forgetful() -> None:
        for _ in range(66):
            engine.zero_grad()
            engine.backward(engine(X).mean())

    with pytest.warns(UserWarning, match=r"64 times without engine\.step\(\)") as seen:
        forgetful()
    assert [one.filename for one in seen] == [__file__]


def test_zero_grad_takes_backward_back(engine: colossalai.Engine) -> None:
    engine.backward(engine.criterion(engine(X), Y))
    engine.zero_grad()
    with pytest.raises(zg.InputError, match=r"without engine\.backward"):
        engine.step()


def test_backward_takes_a_scalar_of_this_step_that_needs_a_gradient(engine: colossalai.Engine) -> None:
    out = engine(X)
    loss = engine.criterion(out, Y)
    for wrong in (out, loss.detach(), torch.tensor(1.0, requires_grad=True), 3.0):
        with pytest.raises(zg.InputError, match="was called with"):
            engine.backward(wrong)
    engine.backward(loss)
    with pytest.raises(zg.InputError, match="twice"):
        engine.backward(loss)
    engine.step()
    with pytest.raises(zg.InputError, match="does not come from"):
        engine.backward(loss)


def test_the_optimizer_is_stepped_by_the_engine_only(engine: colossalai.Engine) -> None:
    assert engine.optimizer is not None
    with pytest.raises(zg.CaptureError, match=r"engine\.step\(\) makes the update"):
        engine.optimizer.step()


def test_calls_of_one_update_must_be_alike(engine: colossalai.Engine) -> None:
    engine.backward(engine.criterion(engine(X), Y))
    engine.step()
    with pytest.raises(zg.InputError, match=r"load_state_dict\(\) after 1 of the 2 calls"):
        engine.load_state_dict({})
    engine.backward(engine.criterion(engine(X[:4]), Y[:4]))
    with pytest.raises(zg.InputError, match="must do the same"):
        engine.step()
    assert engine.graph.steps_done == 0


def test_an_engine_without_optimizer_or_criterion_predicts_and_says_what_it_lacks() -> None:
    model = make("mlp")
    engine, *others = colossalai.initialize(model, config={}, verbose=False)
    assert others == [None, None, None]
    torch.testing.assert_close(engine(X), model(X).detach())
    with pytest.raises(zg.ConfigError, match="no criterion"):
        engine.criterion(engine(X), Y)
    for call in (lambda: engine.backward(X.mean()), engine.step):
        with pytest.raises(zg.ConfigError, match="no optimizer"):
            call()


def test_initialize_names_the_argument_that_is_wrong() -> None:
    model = make("mlp")
    for arguments, name in (
        ({"model": 3}, "model=3"),
        ({"model": model, "optimizer": 3}, "optimizer=3"),
        ({"model": model, "criterion": 3}, "criterion=3"),
        ({"model": model, "lr_scheduler": 3}, "lr_scheduler=3"),
        ({"model": model, "config": 3}, "config=3"),
    ):
        with pytest.raises(zg.ConfigError, match=name):
            colossalai.initialize(**{"config": PLAIN, "verbose": False, **arguments})


def test_initialize_prints_what_differs_from_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    colossalai.initialize(make("mlp"), config={"zero": {"level": 2}, "fp16": False})
    assert capsys.readouterr().out == "zerograph: mode=distributed_split, stage=2\n"


def count_outside() -> None:
    engine = engine_of(make("mlp"))
    x, y = part(X), part(Y)
    out = engine(x)
    mask = torch.arange(8).chunk(2)[zg.rank()] < 5
    loss = (F.cross_entropy(out, y, reduction="none") * mask).mean() * mask.sum()
    engine.backward(loss)
    with pytest.raises(zg.RankMismatchError, match=r"no part of the batch(.|\n)*by the model or the criterion"):
        engine.step()
    out = engine(x)
    early = engine.criterion(out, y)
    if zg.rank() == 0:
        with pytest.raises(zg.RankMismatchError, match=r"asked for before engine\.step\(\), which all ranks"):
            early.item()
    else:
        engine.backward(early)
        with pytest.raises(zg.RankMismatchError, match=r"asked for before engine\.step\(\), which all ranks"):
            engine.step()


def unlike_on_one_rank() -> None:
    engine = engine_of(make("mlp"), gradient_accumulation=2)
    x, y = part(X), part(Y)
    wrong = zg.rank() == 1
    for count in (4, 2 if wrong else 4):
        engine.backward(engine.criterion(engine(x[:count]), y[:count]))
        if count == 4 and not engine._pending:
            engine.step()
    with pytest.raises(zg.InputError if wrong else zg.RankMismatchError, match="must do the same"):
        engine.step()


def test_calls_that_differ_on_one_rank_are_an_error_on_all(pool: Pool) -> None:
    pool.run(2, unlike_on_one_rank)


def test_ranks_that_differ_are_an_error_on_all_and_no_hang(pool: Pool) -> None:
    pool.run(2, count_outside)
