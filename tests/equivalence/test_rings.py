"""Steps of ring attention, of all ranks in one process, against one kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness import deviation
from zerograph.ops.attention import BACKWARD, FORWARD
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
