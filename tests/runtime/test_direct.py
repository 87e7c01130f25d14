"""Ranks of one host read each other's memory: the same numbers as over sockets, and nothing kept that was read."""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import zerograph as zg
from tests.harness import each_stage, sliced
from tests.models import TrainStep, adam_step, adamw, batches, make, part, train_plainly
from tests.pool import Pool
from zerograph import _torch
from zerograph.ir.sbp import Split
from zerograph.runtime import peer_memory
from zerograph.runtime.job.exchange import start_gather
from zerograph.runtime.job.process_group import Job, join
from zerograph.runtime.peer_memory import cross_memory
from zerograph.runtime.peer_memory.cross_memory import bytes_read
from zerograph.runtime.wire import collectives, direct

c10d = torch.ops._c10d_functional

# More than a mailbox has places for.
MANY = 300


def connected(timeout: float = 60.0) -> tuple[Job, str]:
    """A job whose ranks read each other's memory, and the name of its group."""
    job = join(timeout)
    assert direct.hosts(job).groups != (None,), "this machine's ranks cannot read each other's memory"
    return job, job.mesh.groups[0]


def mine(shape: tuple[int, ...], dtype: torch.dtype, rank: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def moved(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bool, bool, int]:
    """(a gather is right, an exchange is, tensors that are still kept)."""
    job, group = connected()
    gathered = c10d.wait_tensor(collectives.gather_pieces(mine(shape, dtype, job.rank), job.size, group))
    received = c10d.wait_tensor(collectives.exchange_pieces(mine(shape, dtype, job.rank), job.size, group))
    others = [(job.rank - step) % job.size for step in range(1, job.size)]
    size = shape[0] // job.size
    sent = [mine(shape, dtype, other)[job.rank * size : (job.rank + 1) * size] for other in others]
    whole = torch.cat([mine(shape, dtype, rank) for rank in range(job.size)])
    return torch.equal(gathered, whole), torch.equal(received, torch.stack(sent)), kept(job)


@patch.object(collectives, "_SMALL", 0)
def summed(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bool, bool, bool, int]:
    """(a sum is right, one in place is and lies there, what was summed is as before, tensors that are still kept)."""
    job, group = connected()
    part, own = mine(shape, dtype, job.rank), mine(shape, dtype, job.rank)
    total = c10d.wait_tensor(collectives.sum_ranks(part, job.size, group))
    in_place = c10d.wait_tensor(collectives.sum_ranks_(own, job.size, group))
    right = sum(mine(shape, dtype, rank) for rank in range(job.size))
    same = torch.equal(in_place, right) and in_place.data_ptr() == own.data_ptr()
    return torch.equal(total, right), same, torch.equal(part, mine(shape, dtype, job.rank)), kept(job)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[((), torch.float32), ((7, 5), torch.bfloat16), ((0,), torch.float32), ((3,), torch.int64)],
        *[((100_001,), torch.float64), ((700, 1000), torch.float32)],
    ],
    ids=str,
)
def test_ranks_sum_in_each_others_memory(pool: Pool, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert pool.run(ranks, summed, shape, dtype) == [(True, True, True, 0)] * ranks


def kept(job: Job) -> int:
    (group,) = direct.hosts(job).groups
    assert group is not None
    return sum(len(peer._kept) for _, peer in group.others())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((12,), torch.float32), ((6, 5), torch.bfloat16), ((0,), torch.float32), ((600_000,), torch.float64)],
    ids=str,
)
def test_pieces_come_from_the_others_memory(pool: Pool, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert pool.run(ranks, moved, shape, dtype) == [(True, True, 0)] * ranks


@patch.object(collectives, "_SMALL", 0)
def in_flight() -> bool:
    job, group = connected()
    started = [collectives.gather_pieces(mine((4,), torch.float32, job.rank, n), job.size, group) for n in range(MANY)]
    # Each takes two places in turn.
    sums = [collectives.sum_ranks(torch.full((5000,), float(n)), job.size, group) for n in range(MANY)]
    # Waited for in another order than started.
    right = [
        torch.equal(c10d.wait_tensor(started[n]), torch.cat([mine((4,), torch.float32, r, n) for r in range(job.size)]))
        for n in reversed(range(MANY))
    ]
    right += [bool((c10d.wait_tensor(sums[n]) == n * job.size).all()) for n in reversed(range(MANY))]
    return all(right) and kept(job) == 0


@sliced("ranks", [3], [2])
def test_more_may_be_in_flight_than_a_mailbox_holds(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, in_flight) == [True] * ranks


def gathered_outside_of_steps(sockets: bool) -> tuple[bool, int]:
    """Gather parts that are split along each dimension, all in flight at once; return bytes received through memory."""
    with patch.dict(os.environ, {"ZEROGRAPH_WIRE": "sockets"} if sockets else {}):
        job = join(52.0 + sockets)
        direct.hosts(job)
        before = bytes_read()
        shapes, dims = [(3,), (40, 50), (7, 5), (0, 4)], [0, 1, 0, 0]
        started = [
            start_gather(job, mine(shape, torch.bfloat16, job.rank, n), (Split(dim),))
            for n, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
        ]
        right = [
            torch.equal(finish(), torch.cat([mine(shape, torch.bfloat16, rank, n) for rank in range(job.size)], dim))
            for n, (finish, shape, dim) in enumerate(zip(started, shapes, dims, strict=True))
        ]
    return all(right), bytes_read() - before


def test_gathers_outside_of_steps_are_those_of_a_step(pool: Pool) -> None:
    sizes = 2 * (3 + 2000 + 35)
    assert pool.run(2, gathered_outside_of_steps, False) == [(True, sizes)] * 2
    assert pool.run(2, gathered_outside_of_steps, True) == [(True, 0)] * 2


@patch.object(collectives, "_SMALL", 0)
def trained(stages: list[int], sockets: bool, backend: Any = "eager") -> list[tuple[list[Tensor], int, int, int]]:
    """Train at each stage; one graph, so captured once.

    Returns:
        For each: losses and parameters, planned bytes, bytes read out of others' memory, number of tensors still kept.
    """
    environment = {"ZEROGRAPH_WIRE": "sockets"} if sockets else {}
    model, results = make("mlp"), []
    with patch.dict(os.environ, environment):
        # A timeout of its own makes a job of its own.
        timeout = 50.0 + sockets
        step = TrainStep(model, adamw(model), bucket_size=512, timeout=timeout, backend=backend)
        for _ in each_stage(step, stages):
            before = bytes_read()
            losses = [step(part(x), part(y)) for x, y in batches("mlp", 3, 12)]
            read = bytes_read() - before
            job = join(timeout)
            assert (direct.hosts(job).groups == (None,)) == sockets
            planned = sum(one.bytes for one in step.inspect.collectives())
            state = step.state_dict()["modules"]["model"]
            results.append(([*losses, *state.values()], 3 * planned, read, 0 if sockets else kept(job)))
    return results


@sliced("stages, ranks", [([0, 3], 2)], [([3], 3)])
def test_a_step_has_the_numbers_that_it_has_over_sockets(pool: Pool, stages: list[int], ranks: int) -> None:
    # Three numbers have several orders in which to be added, and gloo has its own.
    tolerance = 0.0 if ranks == 2 else 1e-6
    over_memory, over_sockets = (
        itertools.chain(*pool.run(ranks, trained, stages, sockets)) for sockets in (False, True)
    )
    for near, far in zip(over_memory, over_sockets, strict=True):
        torch.testing.assert_close(near[0], far[0], rtol=tolerance, atol=tolerance)
        # A new job tries once whether it can read each of the others: a word. A scalar is no whole number of pieces.
        assert 0 < near[1] <= near[2] <= near[1] + 50 * (ranks - 1)
        assert far[2] == 0
        assert near[3] == 0


def writes_over(graph: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
    """A backend that reuses at once what a collective that was waited for has read."""

    class Reusing(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if node.target is c10d.wait_tensor.default:
                start = node.all_input_nodes[0]
                if start.target is collectives.exchange_pieces:
                    whole = self.env[start.all_input_nodes[0]]
                    rank, ranks = dist.get_rank(), dist.get_world_size()
                    for place, piece in enumerate(whole.chunk(ranks)):
                        if place != rank:
                            piece.fill_(float("nan"))
            return result

    interpreter = Reusing(graph, garbage_collect_values=False)
    return interpreter.run


def test_a_backend_may_reuse_what_a_collective_has_read(pool: Pool) -> None:
    both = pool.run(2, trained, [2], False), pool.run(2, trained, [2], False, writes_over)
    for (own,), (users,) in zip(*both, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own[0], users[0], strict=True))


def on_hosts(hosts: str) -> list[Any]:
    """Losses and parameters of ranks, four of them in two rows, each on the host that a letter names, or on none.

    After the training they compare notes, which no mailbox carries.
    """
    grid = zg.placement("cpu", ranks=[[0, 1], [2, 3]] if len(hosts) == 4 else [0, 1, 2])
    mine = hosts[zg.rank()].strip()
    with patch.object(peer_memory, "host", lambda: mine):
        step = adam_step("mlp", 2, placement=grid, timeout=40.0, backend="eager")
        losses = [step(part(x), part(y)) for x, y in batches("mlp", 3, 12)]
        job = join(40.0, grid)
    assert not job.channel._mailboxes
    answers = [job.channel.compare(7 + (job.rank == odd), job.rank == odd)[:2] for odd in range(-1, job.size)]
    assert answers == [(True, False), *[(False, True)] * job.size]
    return [*losses, *step.state_dict()["modules"]["model"].values()]


@sliced("hosts", ["aab", "abca"], ["aaab", "aaa "])
def test_ranks_spread_unevenly_over_hosts_run_the_same_step(pool: Pool, hosts: str) -> None:
    model = make("mlp")
    losses = train_plainly(model, adamw(model), batches("mlp", 3, 12))
    for found in pool.run(len(hosts), on_hosts, hosts):
        torch.testing.assert_close(found, [*losses, *model.state_dict().values()], rtol=1e-5, atol=1e-6)


def over_sockets_where(what: str, error: BaseException | None) -> tuple[bool, list[str], float]:
    """Return whether ranks use sockets once ``what`` of cross_memory is denied, what the log says, and a loss."""
    call = getattr(cross_memory, what)

    def denied(*args: Any) -> None:
        # None: as if it had been done, but it was not.
        if error is not None:
            raise error
        if what == "read":
            call(*args)

    log = logging.getLogger("zerograph.collectives")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with patch.object(cross_memory, what, denied):
            timeout = 61.0
            step = adam_step("mlp", 2, backend="eager", timeout=timeout)
            (data,) = batches("mlp", 1)
            loss = float(step(*map(part, data)))
            return direct.hosts(join(timeout)).groups == (None,), lines, loss
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


@sliced(
    "what, error, said",
    [("write", None, "is not there"), ("write", RuntimeError("Operation not permitted"), "Operation not permitted")],
    [("read", RuntimeError("Operation not permitted"), "Operation not permitted")],
)
def test_ranks_that_may_not_read_and_write_use_sockets_and_say_why(
    pool: Pool, what: str, error: BaseException | None, said: str
) -> None:
    found = pool.run(2, over_sockets_where, what, error)
    for rank, (sockets, lines, _) in enumerate(found):
        assert sockets
        assert any(f"over sockets, not through memory: rank {1 - rank}" in line and said in line for line in lines)


def without_the_folder() -> tuple[bool, list[float]]:
    """Return whether ranks have no transport of their own, and the losses of some steps."""
    with patch.dict(sys.modules, {"zerograph.runtime.peer_memory": None}):
        step = adam_step("mlp", 2, backend="eager", timeout=63.0)
        losses = [float(step(*map(part, data))) for data in batches("mlp", 3)]
        return direct.hosts(join(63.0)).groups == (None,), losses


def test_the_transport_is_a_folder_that_can_be_removed(pool: Pool) -> None:
    model = make("mlp")
    losses = list(map(float, train_plainly(model, adamw(model), batches("mlp", 3))))
    for sockets, found in pool.run(2, without_the_folder):
        assert sockets
        assert found == pytest.approx(losses, rel=1e-5)
    folder = Path(peer_memory.__file__).parent
    importers = {
        path.relative_to(folder.parent).as_posix()
        for path in folder.parent.rglob("*.py")
        if path.parent != folder and re.search(r"^( *)(from|import) .*peer_memory", path.read_text(), re.M)
    }
    # The latter only for types.
    assert importers == {"wire/direct.py", "wire/collectives.py"}


def in_a_new_world(store: str) -> tuple[bool, int, bool]:
    """Return whether a new world reuses a group's name, the messages of a gather there, and whether it is right."""
    old_job, old_name = connected(70.0)
    rank, size = old_job.rank, old_job.size
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    # No rank ends, and closes its connections, before all have opened them.
    dist.barrier()
    group = dist.new_group()
    with patch.object(dist, "isend", wraps=dist.isend) as send:
        gathered = c10d.wait_tensor(collectives.gather_pieces(torch.tensor([rank]), size, group.group_name))
    dist.barrier()
    # The old job is still in memory here, as it may be after an error.
    return group.group_name == old_name, send.call_count, gathered.tolist() == list(range(size))


def test_a_group_named_as_one_of_a_destroyed_world_does_not_use_its_mailboxes(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(3, in_a_new_world, str(tmp_path / "store")) == [(True, 2, True)] * 3


def asked_for(value: str) -> str:
    with patch.dict(os.environ, {"ZEROGRAPH_WIRE": value}), pytest.raises(zg.ConfigError) as caught:
        direct.hosts(join(62.0))
    return str(caught.value)


def test_a_wire_that_there_is_not_is_named(pool: Pool) -> None:
    assert all("ZEROGRAPH_WIRE is 'socket'" in said for said in pool.run(2, asked_for, "socket"))


def hosts_of(size: int) -> Any:
    """Pretend that each ``size`` neighbouring ranks have a host of their own; 0: keep the real host."""
    name = peer_memory.host()
    return patch.object(peer_memory, "host", lambda: f"{name} {int(os.environ['RANK']) // size}" if size else name)


def compared(timeout: float, host: int) -> list[tuple[bool, bool]]:
    """Compare equal and different numbers, with and without flags, and return the last two results."""
    rank = torch.distributed.get_rank()
    with patch.dict(os.environ, {"RANK": str(rank)}), hosts_of(host):
        job = join(timeout)
        direct.hosts(job)
    last = job.size - 1
    assert len(job.channel._mailboxes) == (host or job.size) - 1
    equal = [job.channel.compare(number, False)[:2] for number in range(MANY)]
    different = [job.channel.compare(7 + (rank == one), False)[:2] for one in range(job.size)]
    flagged = [job.channel.compare(7, rank == one)[:2] for one in range(job.size)]
    assert set(equal) == {(True, False)}
    assert set(different) == {(False, False)}
    assert set(flagged) == {(True, True)}
    gathered = job.channel.compare(7, False, [rank, 5 * rank])[2]
    assert gathered == [[one, 5 * one] for one in range(job.size)]
    assert job.channel.compare(7, False, range(9))[2] is None
    return [job.channel.compare(-5 if rank == last else 2**62, rank == 0)[:2], job.channel.compare(-(2**63), False)[:2]]


# With a host for each rank over the group alone.
@pytest.mark.parametrize(("ranks", "host"), [(2, 0), (3, 0), (4, 2), (3, 1)])
def test_ranks_compare_notes_through_mailboxes_and_over_the_group(pool: Pool, ranks: int, host: int) -> None:
    answers = pool.run(ranks, compared, 71.0 + host, host)
    assert answers == [[(False, True), (True, False)]] * ranks


def hung_up() -> tuple[str, str]:
    """Return the errors of two comparisons after rank 1 has hung up."""
    job = join(72.5)
    direct.hosts(job)
    if job.rank == 1:
        job.channel.hang_up()
    told = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="hung up") as caught:
            job.channel.compare(7, False)
        told.append(str(caught.value))
    return told[0], told[1]


def exchanged_with_nobody() -> str:
    """Return the error of an exchange that rank 1 does not join: it hangs up, and tells the store nothing."""
    job = join(72.25)
    (group,) = direct.hosts(job).groups
    assert group is not None
    if job.rank == 1:
        job.channel.hang_up()
        return ""
    tensors = [torch.zeros(1000), torch.zeros(1000)]
    with pytest.raises(RuntimeError) as caught:
        group.exchange(tensors, tensors).wait()
    return str(caught.value)


def test_a_rank_that_hangs_up_is_waited_for_by_nobody(pool: Pool) -> None:
    assert pool.run(2, hung_up) == [("rank 1 has hung up", "this rank has hung up"), ("this rank has hung up",) * 2]
    assert pool.run(2, exchanged_with_nobody) == ["rank 1 has hung up", ""]


def test_what_nothing_has_waited_for_can_be_dropped() -> None:
    class Holding(dist.Work):
        pass

    class Held:
        pass

    tensor, work, held = torch.empty(2), Holding(), Held()
    work.held, reference = held, weakref.ref(held)  # type: ignore[attr-defined]
    _torch.register_works(tensor, [work])
    del work, held
    assert reference() is not None
    _torch.end_works(drops=True)
    assert reference() is None
