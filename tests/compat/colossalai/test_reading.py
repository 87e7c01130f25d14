"""A value that is read before the step has computed it is the one that the step will compute."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.colossalai.loops import engine_of
from tests.models import ConvNet, batches, part
from tests.pool import Pool


class Noisy(nn.Module):
    """Batch norm's buffers and dropout's draws: what a second forward could spoil, or get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = ConvNet(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.net(x))


def looked_at(read: bool, calls: int) -> tuple[list[tuple[Any, float]], list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    config = {"zero": {"level": 3, "gradient_accumulation_steps": calls}, "seed": 7}
    engine = engine_of(Noisy(), **config)
    engine.graph.config.batch_norm = "local"
    losses, outputs = [], []
    for x, y in batches("conv", 2 * calls):
        out = engine(part(x))
        early_out = out.detach().clone().tolist() if read else None
        loss = engine.criterion(out, part(y))
        early = loss.item() if read else None
        engine.backward(loss)
        engine.step()
        losses.append((early, loss))
        outputs.append((early_out, out))
    if read:
        assert all(torch.equal(torch.tensor(early), out) for early, out in outputs), "dropout's draws are the step's"
    return (
        [(early, loss.item()) for early, loss in losses],
        [out for _, out in outputs],
        engine.state_dict()["modules"]["model"],
    )


@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.long), 2])
def test_values_read_early_are_those_of_the_step_and_change_nothing(pool: Pool, calls: int) -> None:
    with_, without = (pool.run(2, looked_at, read, calls)[1] for read in (True, False))
    for (early, late), (_, wanted) in zip(with_[0], without[0], strict=True):
        assert early == late == wanted
    for name, value in without[2].items():
        assert torch.equal(with_[2][name], value), name


class Cycle:
    """Held by itself alone once it is let go of, until the garbage collector comes by."""

    def __init__(self, held: Tensor) -> None:
        self.held, self.itself = held, self


def held_by_one() -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    engine = engine_of(Noisy(), seed=7)
    losses, kept = [], []
    for number, (x, y) in enumerate(batches("conv", 3)):
        out = engine(part(x))
        if number == 1 and dist.get_rank() == 1:
            Cycle(out)
        elif number == 2 and dist.get_rank() == 0:
            kept.append(out)
        losses.append(engine.criterion(out, part(y)))
        del out
        engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses], kept


def test_results_may_be_held_on_one_rank_only(pool: Pool) -> None:
    (losses, (kept,)), (others, _) = pool.run(2, held_by_one)
    assert losses == others
    assert type(kept) is Tensor
    assert kept.shape == (4, 5)


def test_every_way_to_ask_for_a_value_works() -> None:
    engine = engine_of(nn.Linear(7, 3))
    (x, y), *_ = batches("mlp", 1)
    with torch.no_grad():
        wanted = nn.functional.cross_entropy(engine.model(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = engine(x)
        loss = engine.criterion(out, y)
        assert float(loss) == pytest.approx(wanted.item())
        assert f"{loss:.3f}" == f"{wanted:.3f}"
        assert repr(loss) == repr(wanted)
        assert loss > 0
        assert out.numpy().shape == out.detach().cpu().numpy().shape == (8, 3)
        assert len(out.tolist()) == len(out) == 8
        assert (out.shape, out.dtype, out.dim(), out.size(-1)) == ((8, 3), torch.float32, 2, 3)
    engine.backward(loss)
    engine.step()
    assert loss.item() == pytest.approx(wanted.item())


def test_reading_early_is_said_to_cost_a_forward_once() -> None:
    engine = engine_of(nn.Linear(7, 3))
    engine._verbose = True
    (x, y), *_ = batches("mlp", 1)
    loss = engine.criterion(engine(x), y)
    with pytest.warns(UserWarning, match="takes an extra forward") as seen:
        loss.item()
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.criterion(engine(x), y).item()
