"""Steps of ring attention, of all ranks in one process, against one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import deviation
from zerograph.ops import balanced_ring
from zerograph.ops.attention import BACKWARD, FORWARD
from zerograph.ops.balanced_ring import (
    add_balanced,
    add_last_balanced,
    balanced_attention,
    balanced_backward,
    merge_balanced,
    pack_queries,
)
from zerograph.ops.ring_attention import ring_attention, ring_attention_backward


def masks(name: str, queries: int, keys: int) -> Tensor | None:
    """A mask that is added to scores: in each a query has no key on some rank, in the second one on none."""
    near = torch.arange(queries).unsqueeze(1) - torch.arange(keys)
    allowed = {"padding": torch.arange(keys) < 3, "window": (near >= 0) & (near < 3) & (near != 5)}.get(name)
    if allowed is None:
        return None
    if name == "window":
        allowed[1] = False
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf).expand(2, 1, queries, keys)


@pytest.mark.parametrize(("mask", "queries"), [("causal", 8), ("none", 12), ("padding", 12), ("window", 8)])
def test_steps_of_a_ring_compute_what_one_kernel_computes(mask: str, queries: int) -> None:
    ranks, causal, generator = 4, mask == "causal", torch.Generator().manual_seed(0)
    shapes = (2, 4, queries, 6), (2, 2, 8, 6), (2, 2, 8, 6), (2, 4, queries, 6)
    query, key, value, grad_out = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    added = masks(mask, queries, 8)
    out, lse = FORWARD(query, key, value, 0.0, causal, attn_mask=added)
    wanted = BACKWARD(grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=added)
    cut = [tensor.chunk(ranks, 2) for tensor in (query, torch.cat([key, value], -1), grad_out)]
    outs, lses, grad_queries = [], [], []
    grad_pairs = [torch.zeros_like(pair) for pair in cut[1]]
    for rank, (own, own_grad) in enumerate(zip(cut[0], cut[2], strict=True)):
        rows = None if added is None else added.chunk(ranks, 2)[rank]
        attended: tuple[Tensor | None, ...] = (None, None)
        for step in range(ranks):
            attended = ring_attention(own, cut[1][rank - step], *attended, rows, rank, step, ranks, 6, causal, None)
        grad_query = torch.zeros_like(own)
        for step in range(ranks):
            place = (rows, rank, step, ranks, 6, causal, None)
            gradients = ring_attention_backward(own_grad, own, cut[1][rank - step], *attended, *place)
            grad_query += gradients[0]
            grad_pairs[rank - step] += gradients[1]
        outs.append(attended[0])
        lses.append(attended[1])
        grad_queries.append(grad_query)
    found = torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(grad_queries, 2), *torch.cat(grad_pairs, 2).split(6, -1)
    for one, other in zip(found, (out, lse, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def balanced(
    ranks: int, queries: Sequence[Tensor], pairs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor, Tensor]]]:
    """Results and gradients of each rank; one process runs all ranks, step by step."""
    channels, rows = queries[0].shape[-1], queries[0].shape[2]
    diagonal = [(None, rank, 0, ranks, channels, True, None) for rank in range(ranks)]
    attended = [
        ring_attention(*both, None, None, *diagonal[r]) for r, both in enumerate(zip(queries, pairs, strict=True))
    ]
    numbers = [
        (step, ranks, channels, 0 if 2 * step < ranks else rows if rows % 2 else rows // 2, None)
        for step in range(1, ranks // 2 + 1)
    ]

    def shifted(near: Sequence[Tensor], far: Sequence[Tensor], distance: int) -> list[Tensor]:
        sources = [(rank - distance) % ranks for rank in range(ranks)]
        return [near[s].flatten(1) if s + distance < ranks else far[s].flatten(1) for s in sources]

    for step, *rest in numbers:
        packed = [pack_queries([query], None, rest[2]) for query in queries]
        buffers = shifted(pairs, packed, step)
        parts = [balanced_attention(queries[r], pairs[r], buffers[r], r, step, *rest) for r in range(ranks)]
        back = shifted([pack_queries([out], lse, 0) for out, lse in parts], [packed[0][:, :0]] * ranks, ranks - step)
        last = step == ranks // 2
        attended = [merge_balanced(*attended[r], *parts[r], back[r], last, r, step, *rest) for r in range(ranks)]
    totals = [ring_attention_backward(grads[r], queries[r], pairs[r], *attended[r], *diagonal[r]) for r in range(ranks)]
    for step, *rest in numbers:
        packed = [pack_queries([queries[r], grads[r], attended[r][0]], attended[r][1], rest[2]) for r in range(ranks)]
        buffers = shifted(pairs, packed, step)
        parts = [
            balanced_backward(grads[r], queries[r], pairs[r], *attended[r], buffers[r], r, step, *rest)
            for r in range(ranks)
        ]
        back = shifted([pack_queries([one], None, 0) for one, _ in parts], [pair for _, pair in parts], ranks - step)
        add = add_last_balanced if step == ranks // 2 else add_balanced
        totals = [add(*totals[r], *parts[r], back[r], r, step, *rest) for r in range(ranks)]
    return attended, totals


@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (2, 6), (3, 9), (4, 16), (4, 12), (4, 4), (5, 10)])
def test_a_balanced_ring_computes_what_one_kernel_computes(ranks: int, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 6) for heads in (4, 2, 2, 4)]
    query, key, value, grad_out = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    out, lse = FORWARD(query, key, value, 0.0, True)
    wanted = out, lse, *BACKWARD(grad_out, query, key, value, out, lse, 0.0, True)
    cut = [[one.contiguous() for one in x.chunk(ranks, 2)] for x in (query, torch.cat([key, value], -1), grad_out)]
    attended, gradients = balanced(ranks, *cut)
    results = [torch.cat(parts, 2) for parts in (*zip(*attended, strict=True), *zip(*gradients, strict=True))]
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_balanced_ring_takes_an_odd_number_of_narrow_numbers() -> None:
    # Log-sum-exps follow in the same buffer.
    generator = torch.Generator().manual_seed(0)
    query, pair = (torch.randn(1, 1, 3, width, generator=generator).bfloat16() for width in (5, 10))
    found, wanted = (
        balanced(3, *([one] * 3 for one in (query.to(t), pair.to(t), query.to(t))))
        for t in (query.dtype, torch.float64)
    )
    for one, other in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0.03, atol=0.03)


def test_a_balanced_ring_takes_a_rank_without_rows() -> None:
    query, pair = torch.randn(0, 4, 4, 6), torch.randn(0, 2, 4, 12)
    attended, gradients = balanced(4, [query] * 4, [pair] * 4, [query] * 4)
    assert all(out.shape == query.shape for out, _ in attended)
    assert all(one.shape == query.shape for one, *_ in gradients)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_all_ranks_of_a_causal_ring_compute_equally_many_scores(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[int] = []

    def counted(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        scores.append(query.shape[2] * key.shape[2])
        return FORWARD(query, key, *rest, **options)

    monkeypatch.setattr(balanced_ring, "FORWARD", counted)
    query, pair = torch.randn(1, 1, 4, 6), torch.randn(1, 1, 4, 12)
    balanced(ranks, [query] * ranks, [pair] * ranks, [query] * ranks)
    # Each step, all ranks one after the other. Those of a rank's own keys, which are half masked, are not among them.
    of_ranks = torch.tensor(scores).view(-1, ranks).sum(0)
    assert of_ranks.tolist() == [4 * 4 * (ranks - 1) // 2] * ranks


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_in_bf16_rounds_its_result_once(causal: bool) -> None:
    ranks, generator = 4, torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 64, 16, generator=generator).bfloat16() for _ in range(3))
    exact, _ = FORWARD(query.double(), key.double(), value.double(), 0.0, causal)
    kernel, _ = FORWARD(query, key, value, 0.0, causal)
    pairs, outs = torch.cat([key, value], -1).chunk(ranks, 2), []
    for rank, own in enumerate(query.chunk(ranks, 2)):
        attended: tuple[Tensor | None, ...] = (None, None)
        for step in range(ranks):
            attended = ring_attention(own, pairs[rank - step], *attended, None, rank, step, ranks, 16, causal, None)
        outs.append(attended[0])
    ring = torch.cat(outs, 2)
    assert ring.dtype is torch.bfloat16
    # The parts are rounded too: by each kernel.
    assert deviation(ring, exact) < 1.3 * deviation(kernel, exact)
