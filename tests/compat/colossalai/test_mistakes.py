"""Mistakes in the engine's loop are errors that say what to do, on all ranks, before any state changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zerograph as zg
from tests.compat.colossalai.loops import PLAIN, engine_of
from tests.models import batches, make, part
from tests.pool import Pool
from zerograph.compat import colossalai

X, Y = batches("mlp", 1)[0]


@pytest.fixture
def engine() -> colossalai.Engine:
    return engine_of(make("mlp"))


def test_step_needs_backward(engine: colossalai.Engine) -> None:
    engine(X)
    with pytest.raises(zg.InputError, match=r"without engine\.backward"):
        engine.step()


def test_a_backward_by_hand_which_scales_nothing_is_no_backward(engine: colossalai.Engine) -> None:
    engine.criterion(engine(X), Y).backward()
    with pytest.raises(zg.InputError, match=r"without engine\.backward"):
        engine.step()


def test_zero_grad_takes_backward_back(engine: colossalai.Engine) -> None:
    engine.backward(engine.criterion(engine(X), Y))
    engine.zero_grad()
    with pytest.raises(zg.InputError, match=r"without engine\.backward"):
        engine.step()


def test_backward_takes_a_scalar_that_needs_a_gradient(engine: colossalai.Engine) -> None:
    out = engine(X)
    loss = engine.criterion(out, Y)
    for wrong in (out, loss.detach(), 3.0):
        with pytest.raises(zg.InputError, match="was called with"):
            engine.backward(wrong)  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(zg.InputError, match="was called with"):
        engine.backward(engine.criterion(engine(X), Y))
    engine.backward(loss)
    assert engine.step()


def test_a_loss_of_results_from_before_the_update_is_refused(engine: colossalai.Engine) -> None:
    for _ in range(2):
        out = engine(X)
        engine.backward(engine.criterion(engine(X), Y))
        engine.step()
        with pytest.raises(zg.InputError, match="a parameter was changed between"):
            engine.backward(engine.criterion(out, Y))


def test_the_optimizer_is_stepped_by_the_engine_only(engine: colossalai.Engine) -> None:
    assert engine.optimizer is not None
    for _ in range(2):
        with pytest.raises(zg.CaptureError, match=r"engine\.step\(\) makes the update"):
            engine.optimizer.step()
        engine.backward(engine.criterion(engine(X), Y))
        assert engine.step()


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
    assert capsys.readouterr().out == "zerograph: stage=2\n"


def of_own_rows() -> None:
    """A loss of this rank's rows only, which no engine has seen; then the loop goes on."""
    engine = engine_of(make("mlp"))
    before = engine.state_dict()["modules"]["model"]
    engine.backward(F.cross_entropy(engine.model(part(X)), part(Y)))
    with pytest.raises(zg.RankMismatchError, match="a gradient that was computed without global tensors"):
        engine.step()
    after = engine.state_dict()["modules"]["model"]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert engine.graph.steps_done == 0
    engine.backward(engine.criterion(engine(part(X)), part(Y)))
    assert engine.step()


def test_a_loss_of_one_ranks_rows_is_an_error_on_all_ranks(pool: Pool) -> None:
    pool.run(2, of_own_rows)


def unlike() -> None:
    engine = engine_of(make("mlp"))
    x = part(X).double() if zg.rank() else part(X)
    with pytest.raises(zg.RankMismatchError, match="ranks differ before a call of"):
        engine(x)
    with pytest.raises(ValueError, match="batch_size"):
        engine.criterion(engine(part(X)), part(Y)[: 4 - zg.rank()])


def test_ranks_that_pass_unlike_tensors_are_an_error_on_all_ranks(pool: Pool) -> None:
    pool.run(2, unlike)


def weighted(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight)


def with_weight() -> float:
    engine, weight = engine_of(make("mlp"), weighted), torch.tensor([1.0, 2.0, 3.0])
    out = engine(part(X))
    with pytest.raises(RuntimeError, match="weight tensor"):
        engine.criterion(out, part(Y), weight)
    return float(engine.criterion(out, part(Y), zg.replicated(weight)))


def test_a_tensor_of_no_rows_is_passed_as_replicated(pool: Pool) -> None:
    wanted = weighted(make("mlp")(X), Y, torch.tensor([1.0, 2.0, 3.0])).item()
    assert pool.run(2, with_weight) == pytest.approx([wanted, wanted], rel=1e-5)
