"""N ranks with error feedback compute, bit by bit, what plain PyTorch does that keeps each rank's coding errors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
from tests.equivalence.test_wire_formats import assert_equal, inputs as batches, model, optimizer, rounded, train
from tests.harness import LossStep, optimizer_of, sliced, stores_of, sum_of_squares
from tests.models import part
from tests.pool import Pool
from zerograph.ir.sbp import partial_sum
from zerograph.runtime.feedback import pending_residuals, residual as residual_of
from zerograph.runtime.state import in_memory

FEEDBACK = {"reduce": zg.wire("int4", feedback=True)}
Residuals = list[list[Tensor]]


def train_plainly(
    ranks: int, inputs: list[Tensor], micro_batches: int = 1, rows: int = 1
) -> tuple[dict[str, Tensor], Residuals]:
    """Train on one device by int4 gradients; return the parameters, and the residuals by rank and parameter.

    With several ``rows`` of ranks the sums of each row are coded and summed once more, with residuals of their own.
    """
    module = model()
    update = optimizer(module)
    weights = list(module.parameters())
    kept, of_rows = (
        [[torch.zeros_like(weight, dtype=torch.bfloat16) for weight in weights] for _ in range(count)]
        for count in (ranks, rows)
    )
    for x in inputs:
        sums = [[torch.zeros_like(weight) for weight in weights] for _ in range(rows)]
        for rank, own in enumerate(x.chunk(ranks)):
            errors = [torch.zeros_like(weight) for weight in weights]
            for some in own.chunk(micro_batches):
                module.zero_grad()
                sum_of_squares(module, some).backward()
                for index, weight in enumerate(weights):
                    assert weight.grad is not None
                    wanted = weight.grad + kept[rank][index].float() * (1 / micro_batches)
                    sent = rounded(wanted, "int4")
                    sums[rank * rows // ranks][index] += sent
                    errors[index] += wanted - sent
            kept[rank] = [error.bfloat16() for error in errors]
        for index, weight in enumerate(weights):
            weight.grad = sums[0][index] if rows == 1 else torch.zeros_like(weight)
            for row in range(rows if rows > 1 else 0):
                wanted = sums[row][index] + of_rows[row][index].float()
                sent = rounded(wanted, "int4")
                of_rows[row][index] = (wanted - sent).bfloat16()
                weight.grad += sent
        update.step()
    return {name: value.clone() for name, value in module.state_dict().items()}, kept


@sliced("ranks", [3], [2])
def test_every_stage_adds_what_earlier_codes_of_the_rank_lacked(pool: Pool, ranks: int) -> None:
    expected, _ = train_plainly(ranks, batches())
    for result in pool.run(ranks, train, [0, 1, 2, 3] if ranks == 2 else [2], [FEEDBACK])[0]:
        assert_equal(result, expected)


DIFFERENCES = {"gather": zg.wire("int4", feedback=True)}


def train_on_differences(inputs: list[Tensor]) -> dict[str, Tensor]:
    """Train on one device by weights that each step changes by the code of what they lack of exact ones."""
    masters, received = model(), model()
    update = optimizer(masters)
    for x in inputs:
        for weight, master in zip(received.parameters(), masters.parameters(), strict=True):
            weight.data += rounded(master.detach() - weight.data, "int4")
        received.zero_grad()
        gradients = []
        for own in x.chunk(2):
            received.zero_grad()
            sum_of_squares(received, own).backward()
            gradients.append([weight.grad for weight in received.parameters() if weight.grad is not None])
        for master, first, second in zip(masters.parameters(), *gradients, strict=True):
            master.grad = first + second
        update.step()
    return {name: value.clone() for name, value in masters.state_dict().items()}


def test_differences_give_all_ranks_the_weights_of_the_last_step_and_the_code_of_their_change(pool: Pool) -> None:
    for result in pool.run(2, train, [1, 2], [DIFFERENCES])[0]:
        assert_equal(result, train_on_differences(batches()))


def test_received_weights_approach_masters_that_stay(pool: Pool) -> None:
    errors = pool.run(2, stand_still)[0]
    assert errors[0] == 0
    assert 0 < errors[-1] < errors[1] / 100


def stand_still() -> list[float]:
    """Move the weights in one step, then call with a learning rate of 0; return how far this rank's part was off."""
    module = model()
    update = torch.optim.SGD(module.parameters(), lr=0.01)
    step = LossStep(module, update, 2, sum_of_squares, wire=DIFFERENCES)
    x, errors = part(batches()[0]), []
    step.compile(x)
    for lr in (0.01, 0.0, 0.0, 0.0):
        update.param_groups[0]["lr"] = lr
        (store,) = stores_of(step)
        shard = in_memory(store.flat).clone()
        step(x)
        assert store.received is not None
        errors.append(float((store.received.chunk(2)[zg.rank()] - shard).abs().max()))
    return errors


def test_weights_that_the_user_assigns_are_received_exactly_and_a_look_at_them_changes_nothing(pool: Pool) -> None:
    untouched, looked, repaired = pool.run(2, assign)[0]
    assert torch.equal(untouched, looked)
    assert repaired == 0


def assign() -> tuple[Tensor, Tensor, float]:
    """Return the received weights after a step, after a look and a step, and their error after a repair and a step."""
    results = []
    for change in (None, lambda weight: None, lambda weight: weight.data.fill_(torch.nan)):
        step, (x, *_) = _step(DIFFERENCES), batches()
        step(part(x))
        if change is not None:
            with step.full_parameters():
                for weight in step.model.parameters():
                    change(weight)
        step(part(x))
        (store,) = stores_of(step)
        results.append(store.received)
    with step.full_parameters():
        for weight in step.model.parameters():
            weight.data.fill_(0.5)
    step(part(x))
    assert store.received is not None
    slots = [store.received[slot.offset : slot.offset + slot.numel] for slot in store.layout.slots]
    return results[0], results[1], max(float((part - 0.5).abs().max()) for part in slots)


def test_graphs_of_two_dtypes_share_parameters_that_are_gathered_by_differences(pool: Pool) -> None:
    for losses in pool.run(2, alternate_dtypes):
        assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def alternate_dtypes() -> list[float]:
    step = _step(DIFFERENCES)
    half = LossStep(step.model, optimizer_of(step), 2, sum_of_squares, wire=DIFFERENCES)
    half.config.enable_amp(True)
    optimizer_of(step).param_groups[0]["lr"] = 0.0
    return [float(each(part(batches()[0]))) for each in (step, half, step)]


def test_check_replicas_compares_received_weights(pool: Pool) -> None:
    for message in pool.run(2, damage):
        assert "model.0.weight (as received)[0, 3]" in message


def damage() -> str:
    step, (x, *_) = _step(DIFFERENCES), batches()
    step.config.checks.check_replicas = 1
    step(part(x))
    (store,) = stores_of(step)
    assert store.received is not None
    store.received[3] += zg.rank()
    with pytest.raises(zg.ReplicaError) as error:
        step(part(x))
    return str(error.value)


@pytest.mark.long
def test_each_reduction_of_a_grid_has_a_residual(pool: Pool) -> None:
    for result in pool.run(4, on_a_grid)[0]:
        assert_equal(result, train_plainly(4, batches(), rows=2)[0])


def on_a_grid() -> list[dict[str, Tensor]]:
    return train([2, 3], [FEEDBACK], placement=zg.placement("cpu", ranks=[[0, 1], [2, 3]]))


def test_micro_batches_add_equal_shares(pool: Pool) -> None:
    (once, each) = pool.run(2, accumulate, [1, 2])[0]
    assert_equal(each, train_plainly(2, batches(), micro_batches=3)[0])
    # Stage 1 sums a rank's micro-batches and codes the sum.
    for name, value in train_plainly(2, batches())[0].items():
        torch.testing.assert_close(once[name], value, rtol=1e-4, atol=1e-4)


def accumulate(stages: list[int]) -> list[dict[str, Tensor]]:
    return [train([stage], [FEEDBACK], on_nonfinite="ignore", gradient_accumulation_steps=3)[0] for stage in stages]


def test_what_is_sent_over_all_steps_is_the_gradient_but_for_the_last_residual(pool: Pool) -> None:
    """With plain SGD of a loss that is linear in the weights, the weights move by all gradients together."""
    moved, exact, residual = pool.run(2, descend)[0]
    assert (moved - exact - residual).abs().max() <= 1e-2 * exact.abs().max()
    assert residual.abs().max() > 0


def descend() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    step = _linear_step(lr=1.0)
    for _ in range(20):
        step(part(x))
    residual = next(iter(stores_of(step)[0].residuals.values())).float()
    total = torch.zeros_like(residual)
    total.copy_(residual)
    torch.distributed.all_reduce(total)
    moved = -step.state_dict()["modules"]["model"]["weight"]
    return moved.flatten(), 20 * x.sum(0).expand(8, 64).flatten(), -total[: 8 * 64]


def _linear_step(lr: float, **options: Any) -> LossStep:
    module = torch.nn.Linear(64, 8, bias=False)
    torch.nn.init.zeros_(module.weight)
    return LossStep(
        module,
        torch.optim.SGD(module.parameters(), lr=lr),
        2,
        lambda model, x: model(x).sum(),
        wire=FEEDBACK,
        **options,
    )


def test_a_skipped_step_leaves_the_residual_as_it_was(pool: Pool) -> None:
    before, after, later = pool.run(2, skip)[0]
    assert torch.equal(before, after)
    assert later.isfinite().all()
    assert not torch.equal(before, later)


def skip() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    step = _linear_step(lr=0.1, on_nonfinite="skip")
    results = []
    for factor in (1.0, float("inf"), 1.0):
        with pytest.warns() if factor != 1 else contextlib.nullcontext():
            step(part(x) * factor)
        results.append(next(iter(stores_of(step)[0].residuals.values())).clone())
    return results[0], results[1], results[2]


def test_a_growing_loss_scale_keeps_the_size_of_residuals(pool: Pool) -> None:
    scaled, plain = pool.run(2, scale)[0]
    assert torch.equal(scaled, plain)


def scale() -> list[Tensor]:
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for scaler in (zg.GradScaler(init_scale=4.0, growth_interval=2), None):
        step = _linear_step(lr=0.1, grad_scaler=scaler)
        for _ in range(5):
            step(part(x))
        results.append(step.state_dict()["modules"]["model"]["weight"])
    return results


def test_a_checkpoint_resumes_bitwise(pool: Pool, tmp_path: Path) -> None:
    expected, _ = train_plainly(2, batches())
    (resumed, again) = pool.run(2, resume, str(tmp_path / "two"))[0]
    assert_equal(resumed, expected)
    assert_equal(again, expected)


def test_a_checkpoint_has_the_weights_that_all_ranks_have_received(pool: Pool, tmp_path: Path) -> None:
    for resumed in pool.run(2, resume, str(tmp_path / "two"), DIFFERENCES)[0]:
        assert_equal(resumed, train_on_differences(batches()))


def _step(wire: Any = FEEDBACK) -> LossStep:
    module = model()
    return LossStep(module, optimizer(module), 2, sum_of_squares, wire=wire)


def resume(path: str, wire: Any = FEEDBACK) -> list[dict[str, Tensor]]:
    """Save after two steps; return the parameters after one more of the same graph, and of a new one that loads."""
    first = _step(wire)
    *begin, last = batches()
    for x in begin:
        first(part(x))
    first.save(path)
    first(part(last))
    results = [first.state_dict()["modules"]["model"]]
    second = _step(wire)
    second.load(path)
    second(part(last))
    first.load(path)
    first(part(last))
    assert_equal(first.state_dict()["modules"]["model"], results[0])
    return [*results, second.state_dict()["modules"]["model"]]


def test_residuals_are_summed_on_fewer_ranks_and_saved_again_if_nobody_read_them(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(2, save_residuals, str(tmp_path / "two"))
    pool.run(1, copy_checkpoint, str(tmp_path / "two"), str(tmp_path / "one"))
    pool.run(3, copy_checkpoint, str(tmp_path / "one"), str(tmp_path / "three"))
    first, second = pool.run(2, load_residuals, str(tmp_path / "three"))
    for row, own, other in zip(first, *saved, strict=True):
        torch.testing.assert_close(row, (own.float() + other.float()).bfloat16())
    assert not any(row.any() for row in second)


def save_residuals(path: str) -> list[Tensor]:
    step = _step()
    step(part(batches()[0]))
    step.save(path)
    (store,) = stores_of(step)
    return [store.residuals[0][slot.offset : slot.offset + slot.numel] for slot in store.layout.slots]


def copy_checkpoint(source: str, target: str) -> None:
    step = _step()
    step.load(source)
    step.save(target)


def load_residuals(path: str) -> list[Tensor]:
    step = _step()
    step.load(path)
    return [pending_residuals(parameter)[0] for parameter in step.model.parameters()]


@sliced("stages", [(2,)], [(0, 2)])
def test_a_line_of_ranks_owes_what_each_rank_of_a_grid_owed(
    pool: Pool, tmp_path: Path, stages: tuple[int, ...]
) -> None:
    for lost in pool.run(4, from_grid_to_line, str(tmp_path), stages):
        assert lost == [0] * len(stages)


def from_grid_to_line(path: str, stages: tuple[int, ...]) -> list[float]:
    """Return how far the residuals of a line are from those of the grid, by stage."""
    lost = []
    for stage in stages:
        module = model()
        grid = LossStep(module, optimizer(module), stage, sum_of_squares, wire=FEEDBACK)
        grid.config.mesh.placement = zg.placement("cpu", ranks=[[0, 1], [2, 3]])
        grid(part(batches()[0]))
        grid.save(f"{path}/{stage}")
        line = _step()
        line.load(f"{path}/{stage}")
        line.compile(part(batches()[0]))
        (store,), (new,) = stores_of(grid), stores_of(line)
        residual = residual_of(new, 0, (partial_sum,), torch.bfloat16)
        pairs = zip(store.layout.slots, new.layout.slots, strict=True)
        old = store.residuals[1]
        parts = [
            (old.narrow(0, one.offset, one.numel), residual.narrow(0, two.offset, two.numel)) for one, two in pairs
        ]
        assert any(own.any() for own, _ in parts)
        lost.append(max(float((own - other).abs().max()) for own, other in parts))
    return lost
