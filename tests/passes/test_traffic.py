"""Bytes on the wire: 2 Psi for data parallel and stages 1 and 2, 3 Psi for stage 3; planned and seen.

With torch's own reductions, which CommDebugMode counts, and with exchanges, whose every message is counted. Torch's
own gathers are not run: see ``zerograph.runtime.wire.selection``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import Case, sliced, stores_of
from tests.models import batches, make, part
from tests.pool import Pool
from zerograph import Collective
from zerograph.ir.metadata import meta, origin
from zerograph.runtime.wire import collectives, selection

c10d = torch.ops._c10d_functional
mm = torch.ops.aten.mm.default


class _Wire(TorchDispatchMode):
    """Bytes that this rank sends (ring algorithms) in the collectives that really run, scalars apart."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.bytes, self.in_place, self.gathers = ranks, 0.0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        gathers = func is collectives.gather_pieces
        if gathers or (func.namespace == "_c10d_functional" and func is not c10d.wait_tensor.default):
            whole: Tensor = result if gathers else args[0]
            times = 2 if func in (c10d.all_reduce.default, c10d.all_reduce_.default) else 1
            # CommDebugMode does not know these.
            self.in_place += func is c10d.all_reduce_.default
            self.gathers += gathers
            self.bytes += times * whole.numel() * whole.element_size() * (self.ranks - 1) / self.ranks
        return result


@contextmanager
def sent() -> Iterator[list[int]]:
    """Bytes of every message that this rank sends to another."""
    found: list[int] = []
    send = dist.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.numel() * tensor.element_size())
        return send(tensor, *args, **kwargs)

    with patch.object(dist, "isend", isend):
        yield found


def exchanged(name: str, stage: int) -> tuple[list[Collective], int, int]:
    """(planned collectives, bytes sent by exchanges, messages)."""
    every = {"all-gather": collectives.gather_pieces, "reduce-scatter": collectives.exchange_pieces}
    with patch.object(selection, "select_exchanges", lambda job: every):
        step = Case(name, stage, bucket_size=8192).step()
        (x, y), (x2, y2) = batches(name, 2, 12)
        step(part(x), part(y))
    with sent() as messages:
        step(part(x2), part(y2))
    return step.inspect.collectives(), sum(messages), len(messages)


@sliced("name, stage, ranks", [("conv", 1, 2), ("mlp", 3, 3)], [("gpt_of_one_block", 3, 2)])
def test_exchanges_send_what_the_collectives_would(pool: Pool, name: str, stage: int, ranks: int) -> None:
    planned, sent, messages = pool.run_afresh(ranks, exchanged, name, stage)[0]
    moved = [one for one in planned if one.kind in ("all-gather", "reduce-scatter")]
    assert sent == sum(one.bytes for one in moved)
    assert messages == len(moved) * (ranks - 1)


def traffic(name: str, stage: int) -> tuple[list[Collective], float, Counter[str], int]:
    """(planned collectives, bytes seen on the wire, collectives that torch counted, number of buckets)."""
    with patch.object(selection, "select_exchanges", lambda job: {"all-gather": collectives.gather_pieces}):
        return _traffic(name, stage)


def _traffic(name: str, stage: int) -> tuple[list[Collective], float, Counter[str], int]:
    step = Case(name, stage, bucket_size=8192).step()
    (x, y), (x2, y2), (x3, y3) = batches(name, 3, 12)
    step(part(x), part(y))
    ranks = torch.distributed.get_world_size()
    with _Wire(ranks) as seen:
        step(part(x2), part(y2))
    with CommDebugMode() as debug:
        step(part(x3), part(y3))
    # The ranks' exchange of notes before a step is no part of the graph, and goes past the functional collectives.
    counts = Counter({str(op): n for op, n in debug.get_comm_counts().items() if "c10d_functional" in str(op)})
    counts["c10d_functional.all_reduce_"] = seen.in_place
    counts["gather_pieces"] = seen.gathers
    return step.inspect.collectives(), seen.bytes, counts, len(stores_of(step))


@sliced(
    "name, stage, times",
    [*(("mlp", stage, times) for stage, times in ((0, 2), (1, 2), (2, 2), (3, 3))), ("conv", 2, 2)],
    [("conv", 3, 3), *((name, stage, stage) for name in ("gpt", "gpt_tied") for stage in (2, 3))],
)
def test_wire_traffic_is_that_of_the_stage(pool: Pool, name: str, stage: int, times: int) -> None:
    _check(pool, name, stage, times, 2)


def test_wire_traffic_with_four_ranks(pool: Pool) -> None:
    _check(pool, "mlp", 3, 3, 4)


def _check(pool: Pool, name: str, stage: int, times: int, ranks: int) -> None:
    planned, seen, counts, buckets = pool.run_afresh(ranks, traffic, name, stage)[0]
    psi = 4 * sum(p.numel() for p in make(name).parameters())
    big = [one for one in planned if one.tensors[0].startswith("model.")]
    most = times * psi * (ranks - 1) / ranks
    padding = times * buckets * 4 * (ranks - 1)
    # A bucket with nothing but these needs no second gather: no gradient is computed from their values.
    spared = 4 * sum(p.numel() for n, p in make(name).named_parameters() if _unread_by_backward(name, n)) / ranks
    total = sum(one.bytes for one in big)
    assert math.floor(most - (spared * (ranks - 1) if stage == 3 else 0)) <= total <= most + padding
    # Beside the parameters only sums and counts travel: a handful of scalars and batch norm's statistics.
    assert sum(one.bytes for one in planned) - total < 1000
    assert sum(one.bytes for one in planned) == pytest.approx(seen, abs=len(planned))
    kinds = Counter(one.kind.replace("-", "_") for one in planned)
    assert sum(counts.values()) == sum(kinds.values())
    assert counts["gather_pieces"] == kinds["all_gather"]


def _unread_by_backward(model: str, parameter: str) -> bool:
    embedding = parameter in ("tokens.weight", "positions.weight") and model == "gpt"
    return embedding or parameter == "positions.weight" or parameter.endswith("bias")


def gathers(stage: int) -> Counter[tuple[str, ...]]:
    collectives = Case("gpt_tied", stage, bucket_size=8192).prepared().collectives()
    return Counter(one.tensors for one in collectives if one.kind == "all-gather")


def test_stage2_gathers_each_bucket_once_and_stage3_twice() -> None:
    assert set(gathers(2).values()) == {1}
    counts = gathers(3)
    for tensors, count in counts.items():
        # Backward reads every weight but those of embeddings and, here, no bias alone in its bucket.
        assert count == (1 if all(_unread_by_backward("gpt_tied", t.removeprefix("model.")) for t in tensors) else 2)
    assert sum(count == 2 for count in counts.values()) >= 8


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_reduced_while_backward_goes_on(stage: int) -> None:
    prepared = Case("gpt", stage, bucket_size=8192).prepared()
    nodes = list(prepared.graph.graph.nodes)
    products = [at for at, node in enumerate(nodes) if node.target is mm and origin(node).phase == "backward"]
    reductions = [
        at
        for at, node in enumerate(nodes)
        if "boxing" in node.meta and "gradient" in str(meta(node)["boxing"].tensor) and products[0] < at
    ]
    assert len(reductions) > 4
    # Backward has nothing left to hide that of the last bucket.
    assert sum(at < products[-1] for at in reductions) > len(reductions) / 2
