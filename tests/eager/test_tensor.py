"""Global tensors as tensors: metadata, reading, conversions, gradients, errors."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.eager.test_operators import distributed, part, whole
from tests.pool import Pool
from zerograph.runtime.wire import collectives, selection


def metadata() -> None:
    x = whole()
    for rows in ((4, 4), (5, 3)):
        y = distributed(x, rows)
        assert (len(y), y.shape, y.dtype, y.numel(), y.device) == (8, x.shape, x.dtype, 128, x.device)
        assert y.sbp == (zg.sbp.split(0),)
        assert y.to_local().equal(part(x, rows))
        assert y.full_tensor().equal(x)
        assert isinstance(y.full_tensor(), Tensor)
        assert not isinstance(y.full_tensor(), zg.GlobalTensor)


def reading() -> None:
    x, y = whole(), distributed(whole(), (5, 3))
    assert y.tolist() == x.tolist()
    assert (y.numpy() == x.numpy()).all()
    assert float(y.max()) == float(x.max())
    assert int(y.argmax()) == int(x.argmax())
    assert bool((y > 10).any()) == bool((x > 10).any())
    assert f"{y.max():.3f}" == f"{x.max():.3f}"
    assert "S(0)" in repr(y)
    assert repr(y[:, 0]).startswith(repr(x[:, 0])[:60])
    assert (y == y).all()
    assert torch.equal(y, x)
    assert y[7, 3].item() == x[7, 3].item()
    total = y.sum()
    for value in (total.item(), total.item() if zg.rank() == 0 else x.sum().item()):
        # The second time one rank reads alone what all have read.
        assert value == pytest.approx(x.sum().item())
    total += 1
    assert total.item() == pytest.approx(x.sum().item() + 1)


def gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    plain = copy.deepcopy(model)
    x, labels = whole(), torch.arange(8) % 4
    for rows in ((4, 4), (5, 3)):
        model.zero_grad()
        plain.zero_grad()
        loss = F.cross_entropy(model(distributed(x, rows)), distributed(labels, rows))
        expected = F.cross_entropy(plain(x), labels)
        for _ in range(2):
            loss.backward(retain_graph=True)
            expected.backward(retain_graph=True)
        assert loss.sbp == (zg.sbp.partial_sum,)
        torch.testing.assert_close(loss.item(), expected.item())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def sums_that_an_operator_needs() -> None:
    """Backward of a mean over labels divides by the count that forward has added up over the ranks."""
    scores, labels = distributed(whole(), (4, 4)), distributed(torch.arange(8) % 4, (4, 4))
    mean, count = torch.ops.aten.nll_loss_forward(scores.log_softmax(1), labels, None, 1, -100)
    assert (mean.sbp, count.sbp) == ((zg.sbp.partial_sum,), (zg.sbp.broadcast,))


def gradients_of_gradients() -> None:
    def penalty(x: Tensor, weight: Tensor) -> Tensor:
        scores = torch.tanh(x @ weight).sum(1)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean()

    weight, other = torch.ones(16, 3, dtype=torch.float64), torch.ones(16, 3, dtype=torch.float64)
    x = distributed(whole(), (4, 4)).requires_grad_()
    y = whole().requires_grad_()
    loss, expected = penalty(x, weight.requires_grad_()), penalty(y, other.requires_grad_())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(weight.grad.full_tensor(), other.grad)
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)


def hooks() -> None:
    seen: list[Tensor] = []
    x = distributed(whole(), (4, 4)).requires_grad_()
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda gradient: seen.append(gradient) or gradient * 3)
    y.square().mean().backward()
    (gradient,) = seen
    torch.testing.assert_close(gradient.full_tensor(), whole() * 4 / 128)
    torch.testing.assert_close(x.grad.full_tensor(), whole() * 24 / 128)
    torch.testing.assert_close(y.grad.full_tensor(), whole() * 12 / 128)


def of_whole_numbers() -> None:
    exchanges = {"all-gather": collectives.gather_pieces, "reduce-scatter": collectives.exchange_pieces}
    with patch.object(selection, "select_exchanges", lambda job: exchanges):
        x = torch.arange(6, dtype=torch.int32)
        parts = zg.global_tensor(x, zg.sbp.partial_sum).to_global(zg.sbp.split(0))
        torch.testing.assert_close(parts.to_local(), (3 * x).chunk(3)[zg.rank()])


def test_sums_of_pieces_of_three_ranks_keep_their_dtype(pool: Pool) -> None:
    pool.run_afresh(3, of_whole_numbers)


def conversions() -> None:
    x = whole()
    y = distributed(x, (4, 4))
    for sbp in (zg.sbp.broadcast, zg.sbp.split(1), zg.sbp.split(0)):
        moved = y.to_global(sbp)
        assert moved.sbp == (sbp,)
        assert moved.full_tensor().equal(x)
    y = distributed(torch.complex(x, -x), (4, 4)).to_global(zg.sbp.split(1))
    assert y.full_tensor().equal(torch.complex(x, -x))
    columns = distributed(x[:, :2].contiguous(), (5, 3)).to_global(zg.sbp.split(1))
    assert columns.full_tensor().equal(x[:, :2])
    summed = zg.global_tensor(x * (zg.rank() + 1), zg.sbp.partial_sum)
    assert summed.full_tensor().equal(x * 3)
    assert summed.to_global(zg.sbp.split(0)).to_local().equal((x * 3).chunk(2)[zg.rank()])
    for rows, halves in itertools.product(((4, 4), (5, 3)), (False, True)):
        own = part(x, rows).clone().requires_grad_()
        z = zg.global_tensor(own, zg.sbp.split(0)).to_global(zg.sbp.broadcast)
        # The gradient then comes in equal parts.
        z = z.to_global(zg.sbp.split(0)) if halves else z
        (z.full_tensor() ** 2).sum().backward()
        torch.testing.assert_close(own.grad, 2 * part(x, rows))


def dtensors() -> None:
    x = whole()
    y = distributed(x, (4, 4))
    one = y.to_dtensor()
    assert one.full_tensor().equal(x)
    back = zg.GlobalTensor.from_dtensor(one)
    assert back.sbp == y.sbp
    assert back.full_tensor().equal(x)


def copies() -> None:
    x = distributed(whole(), (4, 4)).requires_grad_()
    x.square().sum().backward()
    y = copy.deepcopy(x)
    assert y.requires_grad
    with torch.no_grad():
        y.zero_()
        y.grad.add_(1)
    assert x.full_tensor().equal(whole())
    assert y.grad.full_tensor().equal(2 * whole() + 1)
    assert x.grad.full_tensor().equal(2 * whole())


def numbered_cpu() -> None:
    # As Accelerate names the CPU of a rank.
    x = distributed(whole(), (4, 4)).to("cpu:0")
    assert torch.nn.functional.embedding(x.long().abs() % 3, torch.ones(3, 2)).sbp == (zg.sbp.split(0),)


def writes_past_the_count() -> None:
    """A sum that all ranks have read is read anew after a write through ``.data``, which torch does not count."""
    total = distributed(whole(), (4, 4)).sum()
    assert total.sbp == (zg.sbp.partial_sum,)
    before = total.item()
    total.data.mul_(2)
    assert total.item() == 2 * before
    total.data.zero_()
    assert total.item() == 0


def equal_numbers() -> None:
    """Zeros of both signs, and quotients in the default dtype of the call."""
    x = distributed(whole(), (4, 4))
    for zero in (0.0, -0.0):
        padded = torch.nn.functional.pad(x, (0, 1), value=zero).full_tensor()
        assert padded[:, -1].signbit().all() == (str(zero)[0] == "-")
    counts = x.long()
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert (counts / 3).dtype == dtype
            assert (counts / 3).full_tensor().equal(whole().long() / 3)
        finally:
            torch.set_default_dtype(torch.float32)


CHECKS = [
    equal_numbers,
    *(metadata, reading, gradients, sums_that_an_operator_needs, gradients_of_gradients, hooks, conversions, dtensors),
    *(copies, numbered_cpu, writes_past_the_count),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_global_tensors_are_tensors(pool: Pool, check: Callable[[], None]) -> None:
    pool.run(2, check)


def pickling() -> None:
    with pytest.raises(zg.errors.InputError, match="full_tensor"):
        pickle.dumps(distributed(whole(), (4, 4)))


def changed_shape() -> None:
    with pytest.raises(zg.errors.InputError, match="in place"):
        distributed(whole(), (4, 4)).resize_(2, 3)


def kernel() -> None:
    with pytest.raises(zg.errors.InputError, match="to_local"):
        distributed(whole(), (4, 4)).data_ptr()


def collective() -> None:
    x = distributed(whole(), (4, 4))
    for call in (dist.all_reduce, lambda one: dist.broadcast(one, 0)):
        with pytest.raises(zg.errors.InputError, match="same values on all ranks"):
            call(x)


def wrong_sbp() -> None:
    with pytest.raises(zg.errors.PlacementError, match="has no dimension"):
        zg.global_tensor(torch.zeros(2, 3), zg.sbp.split(2))
    with pytest.raises(zg.errors.PlacementError, match="equal parts"):
        zg.global_tensor(torch.zeros(2, 3), zg.sbp.split(0)).to_global(zg.sbp.split(1))


def other_parts() -> None:
    with pytest.raises(zg.errors.RankMismatchError, match="shape"):
        zg.global_tensor(torch.zeros(2, 3 + zg.rank()), zg.sbp.split(0))


def wrong_shapes() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        distributed(whole(), (4, 4)) + torch.zeros(5)


def plain_parts() -> None:
    with pytest.raises(zg.errors.RankMismatchError, match="a plain tensor beside a global one"):
        distributed(whole(), (4, 4)) + torch.full((16,), float(zg.rank()), dtype=torch.float64)


def other_seeds() -> None:
    torch.manual_seed(zg.rank())
    with pytest.raises(zg.errors.RankMismatchError, match="seed torch equally"):
        torch.rand_like(distributed(whole(), (4, 4)))


def batch_of_gradients() -> None:
    x, eye = distributed(whole(), (4, 4)).requires_grad_(), torch.eye(16, dtype=torch.float64)
    with pytest.raises(zg.errors.InputError, match=r"torch.func.vjp"):
        torch.autograd.grad(x.square().sum(0), x, eye, is_grads_batched=True)
    (rows,) = torch.vmap(torch.func.vjp(lambda x: x.square().sum(0), x)[1])(eye)
    torch.testing.assert_close(rows.full_tensor()[3, :, 3], 2 * whole()[:, 3])


ERRORS = [pickling, changed_shape, kernel, collective, wrong_sbp, other_parts, wrong_shapes, plain_parts, other_seeds]
ERRORS += [batch_of_gradients]


@pytest.mark.parametrize("check", ERRORS, ids=lambda check: check.__name__)
def test_errors_of_global_tensors(pool: Pool, check: Callable[[], None]) -> None:
    pool.run_afresh(2, check)


def part_of_one_rank(dim: int, sizes: tuple[int, int]) -> None:
    values = torch.arange(12.0, dtype=torch.float64).view(3, 4).narrow(dim, 0, sum(sizes))
    part = values.narrow(dim, sum(sizes[: zg.rank()]), sizes[zg.rank()]).clone().requires_grad_()
    x = zg.global_tensor(part, zg.sbp.split(dim))
    x.square().sum().backward()
    assert torch.equal(x.full_tensor(), values)
    assert part.grad is not None
    assert torch.equal(part.grad, 2 * part)


@pytest.mark.parametrize(("dim", "sizes"), [(0, (3, 0)), (1, (0, 4)), (0, (0, 0))])
def test_a_part_may_be_empty(pool: Pool, dim: int, sizes: tuple[int, int]) -> None:
    pool.run(2, part_of_one_rank, dim, sizes)
