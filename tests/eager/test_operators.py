"""Operators on global tensors compute what plain PyTorch computes on the whole tensor, on equal and unequal parts."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import sliced
from tests.pool import Pool
from zerograph.eager.program import Spec

ROWS = {"equal parts": (4, 4), "unequal parts": (5, 3)}


def whole(seed: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    return x.split(list(rows))[zg.rank()]


def distributed(x: Tensor, rows: tuple[int, ...]) -> zg.GlobalTensor:
    return zg.global_tensor(part(x, rows), zg.sbp.split(0))


def changed(change: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """Return a function that returns a copy of its argument after a change in place."""

    def run(x: Tensor) -> Tensor:
        result = x.clone()
        change(result)
        return result

    return run


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double()


def columns(x: Tensor) -> Tensor:
    """Return an index for each element of a row."""
    return x.abs().long() % 16


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3, dim=0),
    "sort": lambda x: x.sort(dim=0),
    "kthvalue": lambda x: x.kthvalue(3, 0),
    "cumsum": lambda x: x.cumsum(0),
    "cat": lambda x: torch.cat([x, x * 2]),
    "stack": lambda x: torch.stack([x, x]),
    "chunk": lambda x: torch.cat(x.chunk(2)[::-1]),
    "split": lambda x: x.split(3),
    "unbind": lambda x: x.unbind(0),
    "row": lambda x: x[3],
    "rows": lambda x: x[2:6],
    "every second row": lambda x: x[::2],
    "mask of rows": lambda x: x[x[:, 0] > 0],
    "mask of elements": lambda x: x[x > 0],
    "indices": lambda x: x[torch.tensor([7, 0, 3])],
    "nonzero": lambda x: (x > 1).nonzero(),
    "where": lambda x: torch.where(x > 0, x, 0),
    "share of the batch": lambda x: x.sum(1).topk(int(0.7 * len(x))).values,
    "iteration": lambda x: sum(row.sum() for row in x),
    "mean": lambda x: x.mean(),
    "divided by len": lambda x: x.sum(0) / len(x),
    "std": lambda x: x.std(0),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "max": lambda x: x.max(0),
    "median": lambda x: x.median(),
    "quantile": lambda x: x.quantile(0.3),
    "prod": lambda x: x.prod(0),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "softmax over the batch": lambda x: x.softmax(0),
    "square of a sum": lambda x: x.sum(0) ** 2,
    "a sum and a number": lambda x: x.sum(0) + 1,
    "a sum in place": lambda x: x.sum(0).add_(1).relu_().mul_(2),
    "less its mean": lambda x: x - x.mean(0),
    "matmul": lambda x: x @ x.t(),
    "einsum": lambda x: torch.einsum("bi,bj->ij", x, x),
    "outer": lambda x: x[:, None] * x[None],
    "triu": lambda x: (x @ x.t()).triu(1),
    "cdist": lambda x: torch.cdist(x, x),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "view": lambda x: x.view(8, 4, 4).permute(2, 0, 1).reshape(4, -1),
    "flatten": lambda x: x.flatten(),
    "expand": lambda x: x[:1].expand(8, 16) * x,
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "new_zeros": lambda x: x.new_zeros(8, 3) + x[:, :3],
    "one_hot": lambda x: F.one_hot(columns(x), 16),
    "gather": lambda x: x.gather(1, columns(x)),
    "scatter": lambda x: torch.zeros(8, 16, dtype=x.dtype).scatter(1, columns(x), x),
    "index_add": lambda x: torch.zeros(5, 16, dtype=x.dtype).index_add(0, torch.arange(8) % 5, x),
    "unique": lambda x: x.sign().unique(),
    "bincount": lambda x: columns(x).flatten().bincount(),
    "conjugates": lambda x: [(z := torch.complex(x, x.roll(1, 1))).conj(), z.conj().imag, z.conj().sum(0), z.mH @ z],
    "a conjugate in place": lambda x: changed(lambda z: z.conj().mul_(2j))(torch.complex(x, 2 * x)),
    "cast": lambda x: x.bfloat16().double(),
    "a value of it": lambda x: x * x.max().item(),
    "conv": lambda x: F.conv1d(x.view(8, 1, 16), torch.ones(2, 1, 3, dtype=x.dtype)),
    "layer norm": lambda x: F.layer_norm(x, (16,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "embedding": lambda x: F.embedding(columns(x), torch.arange(64.0).view(16, 4)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(8, 2, 2, 4)] * 3, is_causal=True),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.flip(1)),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    "cross entropy": lambda x: F.cross_entropy(x, columns(x)[:, 0], ignore_index=1),
    "mse": lambda x: F.mse_loss(x, x.roll(1, 1)),
    "gru": lambda x: seeded(lambda: nn.GRU(4, 3, batch_first=True))(x.view(8, 4, 4)),
    "lstm": lambda x: seeded(lambda: nn.LSTM(4, 3, batch_first=True))(x.view(8, 4, 4))[0],
    "attention layer": lambda x: seeded(lambda: nn.MultiheadAttention(4, 2, batch_first=True))(*[x.view(8, 4, 4)] * 3),
    "in place": changed(lambda x: x.mul_(2).add_(1).clamp_(min=0)),
    "a column is zeroed": changed(lambda x: x[:, 0].zero_()),
    "a row is zeroed": changed(lambda x: x[3].zero_()),
    "rows are scaled": changed(lambda x: x[2:6].mul_(3)),
    "a row of a transpose": changed(lambda x: x.t()[2].fill_(7)),
    "a row of a row": changed(lambda x: x.view(8, 4, 4)[6][1].zero_()),
    "a column is set": changed(lambda x: x.__setitem__((slice(None), 1), 5.0)),
    "a row is set": changed(lambda x: x.__setitem__(2, x[5])),
    "a product into a tensor": lambda x: torch.mm(x, torch.eye(16, dtype=x.dtype) * 2, out=torch.empty_like(x)),
    "into a plain tensor": lambda x: torch.add(x, 1, alpha=2, out=torch.empty(8, 16, dtype=x.dtype)),
    "into memory of any values": lambda x: torch.full((2, 16), float(id(x)), dtype=x.dtype)[0].copy_(x[3]),
    "into an empty tensor": lambda x: torch.max(x, 1, out=(torch.empty(0, dtype=x.dtype), torch.empty(0).long())),
    "a mask is set": changed(lambda x: x.__setitem__(x > 0, 5.0)),
    "a shape in place": changed(lambda x: x.unsqueeze_(1).squeeze_(1).t_().mul_(2).t_()),
    "a detached row follows its base": changed(lambda x: [v := x[6], x.mul_(2), v.detach().add_(1), v.data.mul_(3)]),
    "a detached row": lambda x: [y := x.clone(), v := y[6], y.mul_(2), v.detach() * 1, copy.copy(v), copy.deepcopy(v)],
    "a row is zeroed after another": changed(lambda x: [v := x[6], x[1].copy_(v), v.zero_()]),
    "sparse rows": lambda x: torch.sparse.mm(x.to_sparse(), torch.ones(16, 3, dtype=x.dtype)),
    "a sparse matrix": lambda x: torch.sparse.mm(torch.eye(8, dtype=x.dtype).to_sparse() * 2, x),
    "sparse coordinates": lambda x: [
        (z := torch.sparse_coo_tensor(columns(x)[:, :2].t(), x[:, 0], (16, 16)).coalesce()).to_dense(),
        torch.sparse.mm(z, x.t()),
    ],
    "integers of a list": lambda x: torch.LongTensor([*columns(x)[:, 0]]),
    "parts are swapped": changed(lambda x: x.copy_(torch.cat(x.clone().chunk(2)[::-1]))),
}


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for one in value for leaf in leaves(one)]


def compare(name: str, rows: tuple[int, ...]) -> None:
    x = whole()
    expected = leaves(OPERATORS[name](x))
    with warnings.catch_warnings(action="ignore", category=zg.ZeroGraphWarning):
        results = leaves(OPERATORS[name](distributed(x, rows)))
        with torch.inference_mode():
            in_inference = leaves(OPERATORS[name](distributed(x, rows)))
    assert len(results) == len(in_inference) == len(expected)
    for result, value in zip([*results, *in_inference], expected * 2, strict=True):
        assert result.shape == value.shape
        assert result.dtype == value.dtype
        # A plain tensor that was written to, as in a recurrent layer, stays one, equal on all ranks.
        whole_result = result.full_tensor() if isinstance(result, zg.GlobalTensor) else result
        torch.testing.assert_close(whole_result.detach(), value.detach(), rtol=1e-12, atol=1e-12)


@sliced(
    "name, parts",
    [(name, "unequal parts" if number % 4 else "equal parts") for number, name in enumerate(OPERATORS)],
    itertools.product(OPERATORS, ROWS),
)
def test_an_operator_computes_what_it_computes_on_the_whole_tensor(pool: Pool, name: str, parts: str) -> None:
    pool.run(2, compare, name, ROWS[parts])


def view_after_a_write() -> None:
    x, y = distributed(whole(), (4, 4)), whole()
    row, plain = x[6], y[6]
    x.mul_(2)
    y.mul_(2)
    torch.testing.assert_close(row.full_tensor(), plain)
    row.add_(1)
    plain.add_(1)
    torch.testing.assert_close(x.full_tensor(), y)
    with torch.inference_mode():
        assert x.sum().item() == pytest.approx(y.sum().item())
    # Writes that torch counts of other tensors, and those to a list.
    rows, plains = [x[5:7], x[3:5], x[2:6]], [y[5:7], y[3:5], y[2:6]]
    for tensor, views in ((x, rows), (y, plains)):
        tensor.t().data.mul_(3)
        views[0].data.add_(1)
        torch._foreach_mul_(views[:2], 2)
    for one, plain in zip((x, *rows), (y, *plains), strict=True):
        torch.testing.assert_close(one.full_tensor(), plain)


def test_a_view_that_was_copied_follows_its_base(pool: Pool) -> None:
    pool.run(2, view_after_a_write)


def two_batches() -> None:
    x, y = whole(), whole(1)
    result = distributed(x, (5, 3)) * distributed(y, (3, 5)) + distributed(y, (4, 4))
    torch.testing.assert_close(result.full_tensor(), x * y + y)


def test_batches_whose_parts_differ_go_together(pool: Pool) -> None:
    pool.run(2, two_batches)


def recurrent_layers() -> None:
    x = whole().view(8, 4, 4)
    for kind, batch_first in itertools.product((nn.RNN, nn.LSTM, nn.GRU), (True, False)):
        layer = seeded(lambda kind=kind, batch_first=batch_first: kind(4, 3, batch_first=batch_first))  # type: ignore[misc]
        given = zg.global_tensor(part(x, (4, 4)), zg.sbp.split(0))
        result, state = layer(given if batch_first else given.transpose(0, 1))
        assert result.sbp == (zg.sbp.split(0 if batch_first else 1),)
        plain, _ = layer(x if batch_first else x.transpose(0, 1))
        torch.testing.assert_close(result.full_tensor(), plain)
        again, _ = layer(given if batch_first else given.transpose(0, 1), state)
        assert again.sbp == result.sbp


def test_rows_of_recurrent_layers_stay_split(pool: Pool) -> None:
    pool.run(2, recurrent_layers)


def numbers_that_change() -> int:
    x = distributed(whole(), (4, 4))
    for number in range(5):
        x = x * (0.5 + number) + number
    from zerograph.eager.world import world

    return sum(len(known.programs) for known in world().operators.values())


def test_a_number_that_changes_compiles_nothing_anew(pool: Pool) -> None:
    # One program for the product, one for the sum with a whole number, one for that with a fraction.
    assert max(pool.run_afresh(2, numbers_that_change)) < 40


def metadata_of_sizes_that_change() -> int:
    def live() -> int:
        gc.collect()
        return sum(type(one) is Spec for one in gc.get_objects())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerograph.eager.world._MOST_PROGRAMS", 4)
        counts = []
        for first in (1, 7, 13):
            for length in range(first, first + 6):
                (zg.global_tensor(torch.ones(4, length), zg.sbp.split(0)) * 2).sum(0).tanh()
            counts.append(live())
    return counts[-1] - counts[0]


def test_metadata_of_sizes_that_are_gone_is_freed(pool: Pool) -> None:
    # Of each operator at most four programs are kept.
    assert max(pool.run(2, metadata_of_sizes_that_change)) < 12


def numbers_of_programs() -> None:
    y = whole()
    for number in (2, 3):
        x, weight = distributed(y, (4, 4)), zg.global_tensor(torch.zeros(8, 16, dtype=y.dtype), zg.sbp.broadcast)
        weight.add_(x, alpha=number)
        torch.testing.assert_close(weight.full_tensor(), y * number)
        kept = distributed(y > 0, (4, 4))
        masked = torch.ops.aten.native_dropout_backward(x, kept, float(number))
        torch.testing.assert_close(masked.full_tensor(), y * (y > 0) * number)
        torch.testing.assert_close(x.sum(0).add_(number).full_tensor(), y.sum(0) + number)
        torch.testing.assert_close((x.sum(0) + number).full_tensor(), y.sum(0) + number)
    for number in (0.0, 0.1):
        # A partial sum plus 0 is one too, plus another number it is none.
        torch.testing.assert_close((x.sum() + number).full_tensor(), y.sum() + number)


def test_a_number_inside_a_program_is_that_of_the_call(pool: Pool) -> None:
    pool.run(2, numbers_of_programs)


def draws(rows: tuple[int, int] | None) -> list[list[float]]:
    """Draw from global tensors, or without ``rows`` from plain ones."""
    torch.manual_seed(3)
    x = torch.linspace(0, 1, 128).view(8, 16)
    y = x if rows is None else distributed(x, rows)
    generator = torch.Generator().manual_seed(5)
    drawn = [
        torch.randn_like(y),
        F.dropout(y + 1, 0.5),
        torch.bernoulli(y),
        torch.empty_like(y).uniform_(1, 2, generator=generator),
        torch.zeros_like(y).bernoulli_(y),
        torch.normal(y, 2.0),
        y.sum(0).clone().normal_(),
        F.rrelu(y - 0.5, training=True),
        torch.multinomial(y + 0.1, 3).double(),
        torch.randint_like(y, 100),
        torch.rand(3),
    ]
    return [(one.full_tensor() if isinstance(one, zg.GlobalTensor) else one).flatten().tolist() for one in drawn]


def test_random_numbers_are_those_of_plain_pytorch(pool: Pool) -> None:
    plain = draws(None)
    for rows in ((4, 4), (5, 3)):
        for values in pool.run(2, draws, rows):
            assert values == plain
    assert len(set(plain[0])) == 128
