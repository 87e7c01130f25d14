"""Exchanges over hosts of several ranks: the same numbers, and each byte crosses the wire once per host."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import deviation, joined, plain_run, sliced
from tests.models import adam_step, batches, part, train_on
from tests.pool import Pool
from zerograph.ir import hosts as hosts_of_ranks
from zerograph.ir.mesh import line
from zerograph.ir.wire import wire
from zerograph.ops import blocks
from zerograph.planner.front import calibrate
from zerograph.runtime import peer_memory
from zerograph.runtime.job.process_group import join
from zerograph.runtime.wire import collectives, direct, selection

c10d = torch.ops._c10d_functional


def on_host(hosts: str) -> Any:
    """Let each rank be on the host that a letter names."""
    host = peer_memory.host
    return patch.object(peer_memory, "host", lambda: f"{host()} {hosts[dist.get_rank()]}")


def mine(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    return torch.randint(-100, 100, (size, 3), generator=torch.Generator().manual_seed(rank)).to(dtype)


def moved(hosts: str, size: int, dtype: torch.dtype) -> tuple[list[bool], list[int]]:
    """Which exchanges are right, and the bytes that this rank sends over gloo in each."""
    with on_host(hosts):
        job = join(60.0)
        assert direct.hosts(job).spanning is not None
    assert selection.select_exchanges(job)["reduce-scatter, summed"] is collectives.reduce_pieces
    group, rank, ranks = job.mesh.groups[0], job.rank, job.size
    everybody = [mine(size * ranks, dtype, other) for other in range(ranks)]
    total = torch.stack(everybody).sum(0).to(dtype)
    piece = slice(rank * size, (rank + 1) * size)
    runs = {
        "gather": lambda: collectives.gather_pieces(everybody[rank][:size], ranks, group),
        "reduce": lambda: collectives.reduce_pieces(everybody[rank].clone(), ranks, group),
        "sum": lambda: collectives.sum_ranks(everybody[rank].clone(), ranks, group),
    }
    expected = {"gather": torch.cat([one[:size] for one in everybody]), "reduce": total[piece], "sum": total}
    right, sent = [], []
    send = dist.isend

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[-1] += tensor.nbytes
        return send(tensor, *args, **kwargs)

    with patch.object(dist, "isend", counted), patch.object(collectives, "_SMALL", 0):
        for kind, run in runs.items():
            sent.append(0)
            # Two in flight: the second must not disturb the first.
            first, second = run(), run()
            results = c10d.wait_tensor(first), c10d.wait_tensor(second)
            right.append(all(torch.equal(result, expected[kind]) for result in results))
    return right, [count // 2 for count in sent]


@pytest.mark.parametrize(("size", "dtype"), [(5, torch.float64), (20_000, torch.float32), (3, torch.bfloat16)], ids=str)
def test_each_piece_crosses_the_wire_once_per_host(pool: Pool, size: int, dtype: torch.dtype) -> None:
    whole = 4 * size * 3 * dtype.itemsize
    for right, sent in pool.run(4, moved, "aabb", size, dtype):
        assert right == [True, True, True]
        # A rank's piece of a gather and of a reduction; half of a sum, which is both. Flat, each were twice as much.
        assert sent == [whole // 4, whole // 4, whole // 2]


CODEC = wire("int8").codec
PIECE = 4 * CODEC.block


def reduced_in_code(hosts: str, dtype: torch.dtype) -> tuple[bool, int]:
    """Return whether a coded sum is that of the codes of the hosts' sums, and the bytes that this rank sends."""
    with on_host(hosts):
        job = join(60.0)
        assert direct.hosts(job).spanning is not None
    group, rank, ranks = job.mesh.groups[0], job.rank, job.size
    draw = lambda other: torch.randn(ranks * PIECE, generator=torch.Generator().manual_seed(other)).to(dtype)  # noqa: E731
    sums = [sum(draw(other).float() for other in range(ranks) if hosts[other] == host) for host in sorted(set(hosts))]
    coded = [blocks.encode(one, *CODEC.arguments) for one in sums]
    expected = blocks.sum_decoded(torch.stack(coded), *CODEC.arguments, dtype).chunk(ranks)[rank]
    with patch.object(dist, "isend", wraps=dist.isend) as send:
        started = collectives.reduce_coded(draw(rank), *CODEC.arguments, dtype, ranks, group)
        result = c10d.wait_tensor(started)
    return torch.equal(result, expected), sum(call.args[0].nbytes for call in send.call_args_list)


@sliced("dtype", [torch.bfloat16], [torch.float32])
def test_a_coded_sum_crosses_the_wire_once_per_host(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(4, reduced_in_code, "aabb", dtype) == [(True, CODEC.coded_bytes(PIECE))] * 4


def trained(hosts: str, stages: list[int]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    results = []
    with on_host(hosts):
        for stage in stages:
            step = adam_step("mlp", stage, dtype=torch.float64)
            results.append(train_on(step, batches("mlp", 3, 8, torch.float64)))
    return results


@sliced("stages", [[0, 3]], [[2]])
def test_four_ranks_on_two_hosts_compute_what_one_device_computes(pool: Pool, stages: list[int]) -> None:
    plain = plain_run("mlp", 3, 8, torch.float64)
    for results in pool.run(4, trained, "aabb", stages):
        for losses, state in results:
            assert max(map(deviation, losses, plain.losses)) <= 1e-12
            assert deviation(joined(state), joined(plain.state)) <= 1e-12


def sent_in_a_step(hosts: str, stage: int, wire_format: str) -> tuple[int, int]:
    """Return the bytes that this rank sends to the other host in a step, and those that ``collectives()`` says."""
    with on_host(hosts), patch.object(collectives, "_SMALL", 0), patch.object(hosts_of_ranks, "SMALL_SUM", 0):
        step = adam_step("mlp", stage, wire=wire_format)
        x, y = map(part, batches("mlp", 1)[0])
        step(x, y)
        with patch.object(dist, "isend", wraps=dist.isend) as send:
            step(x, y)
        # A sum of one number is not cut in two.
        listed = sum(one.between for one in step.inspect.collectives() if one.tensor_bytes > 8)
    return sum(call.args[0].nbytes for call in send.call_args_list if call.args[0].nbytes > 8), listed


@sliced("stage, wire_format", [(2, "exact"), (3, "int8")], [(0, "exact")])
def test_collectives_lists_the_bytes_that_go_to_other_hosts(pool: Pool, stage: int, wire_format: str) -> None:
    for sent, listed in pool.run(4, sent_in_a_step, "aabb", stage, wire_format):
        assert sent == listed > 0


def test_a_step_prepared_for_three_hosts_lists_what_leaves_them() -> None:
    step = adam_step("gpt", 3)
    batch = [tensor.chunk(6)[0] for tensor in batches("gpt", 1, 12)[0]]
    prepared = step.prepare(line(6, 0, "ranks"), *batch, transport="hosts:3")
    moved = [one for one in prepared.collectives() if one.kind in ("all-gather", "reduce-scatter")]
    # Two of three hosts are others, and the two ranks of a host share what goes there.
    assert all(one.between == round(one.tensor_bytes * 2 / 6) for one in moved)
    assert all(one.bytes == round(one.tensor_bytes * 5 / 6) for one in moved)
    assert "of them to other hosts" in prepared.describe()


def spans(hosts: str) -> bool:
    with on_host(hosts):
        return direct.hosts(join(60.0)).spanning is not None


@pytest.mark.parametrize("hosts", ["abab", "aaab", "aaaa", "abcd"])
def test_other_layouts_use_flat_exchanges(pool: Pool, hosts: str) -> None:
    assert pool.run(4, spans, hosts) == [False] * 4


def summed_twice(hosts: str) -> bool:
    """Return whether a reduction and a sum of the same numbers have the same bits."""
    with on_host(hosts):
        job = join(60.0)
        assert direct.hosts(job).spanning is not None
    group, rank, ranks = job.mesh.groups[0], job.rank, job.size
    # Sums of three hosts depend on the order.
    whole = torch.randn(ranks * 1000, generator=torch.Generator().manual_seed(rank))
    with patch.object(collectives, "_SMALL", 0):
        total = c10d.wait_tensor(collectives.sum_ranks(whole, ranks, group))
    piece = c10d.wait_tensor(collectives.reduce_pieces(whole, ranks, group))
    return torch.equal(piece, total.chunk(ranks)[rank])


@pytest.mark.long
def test_three_hosts_add_in_one_order_in_every_exchange() -> None:
    pool = Pool(size=6)
    assert pool.run(6, summed_twice, "aabbcc") == [True] * 6
    pool.close()


def measured_links(hosts: str) -> list[tuple[int | None, bool]]:
    with on_host(hosts), patch.object(calibrate, "_SENT", (2**10, 2**14)), patch.object(calibrate, "_REPEATS", 1):
        links = calibrate._Measure(join(60.0), torch.device("cpu")).links()
        return [(link.ranks, link.rate.seconds(2**20) > 0) for link in links]


@sliced("hosts, levels", [("abcd", [(None, True)])], [("aabb", [(2, True), (None, True)])])
def test_calibration_measures_both_levels_of_the_network(pool: Pool, hosts: str, levels: list[Any]) -> None:
    assert pool.run(4, measured_links, hosts) == [levels] * 4


def test_where_each_rank_codes_its_own_part_all_codes_are_listed() -> None:
    step = adam_step("gpt", 2, wire={"reduce": wire("int8", feedback=True)})
    batch = [tensor.chunk(4)[0] for tensor in batches("gpt", 1)[0]]
    listed = step.prepare(line(4, 0, "ranks"), *batch, transport="hosts").collectives()
    moved = [one for one in listed if one.format.endswith("with error feedback")]
    assert moved
    # Of the three pieces for other ranks two go to the other host.
    assert all(abs(one.between * 3 - one.bytes * 2) <= 3 and one.bytes < one.tensor_bytes / 4 for one in moved)
