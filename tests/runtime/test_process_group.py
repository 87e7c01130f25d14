"""Jobs come and go in one process; what they held goes with them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerograph as zg
from tests.models import adam_step, batches, part
from tests.pool import Pool
from zerograph.compat import colossalai, oneflow
from zerograph.runtime.job import process_group
from zerograph.runtime.job.channel import hang_up
from zerograph.runtime.job.process_group import connect, enter, initialise

THREADS = Path("/proc/self/task")


def train_and_count_threads() -> int:
    step = adam_step("mlp", 2)
    ((x, y),) = batches("mlp", 1)
    step(part(x), part(y))
    return len(list(THREADS.iterdir()))


@pytest.mark.skipif(not THREADS.exists(), reason="counts the threads that Linux shows in /proc")
def test_a_job_that_is_over_leaves_no_threads(pool: Pool) -> None:
    """Each process group of gloo has threads that wake a hundred times a second: hundreds of groups stop a machine."""
    counts = [pool.run(2, train_and_count_threads)[0] for _ in range(3)]
    assert counts[-1] <= counts[1]


def count_threads_of_placements() -> tuple[int, int]:
    """Threads after the first placement, and after many that are the same."""
    counts = []
    for _ in range(2):
        placement = zg.placement("cpu", ranks=[[0, 1]])
        step = adam_step("mlp", 2, placement=placement, backend="eager")
        ((x, y),) = batches("mlp", 1)
        step(part(x), part(y))
        counts.append(len(list(THREADS.iterdir())))
    return counts[0], counts[-1]


@pytest.mark.skipif(not THREADS.exists(), reason="counts the threads that Linux shows in /proc")
def test_a_placement_asked_for_again_costs_nothing(pool: Pool) -> None:
    # In a second world as in the first, whose placements are over.
    for first, last in (pool.run(2, count_threads_of_placements)[0] for _ in range(2)):
        assert first == last


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "abc") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")),
        *(("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "70000"), ("LOCAL_RANK", "")),
        ("TORCHELASTIC_RESTART_COUNT", "1.5"),
    ],
)
def test_a_variable_of_the_launcher_that_is_no_number_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for key, text in {**LAUNCHED, name: value}.items():
        monkeypatch.setenv(key, text)
    # As if nobody had initialised anything.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(
        zg.CommunicationError, match=f"the environment variable {name} is '{value}': it must be a whole"
    ):
        initialise()


def test_other_readers_of_the_environment_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "abc")
    with pytest.raises(zg.CommunicationError, match="LOCAL_RANK is 'abc'"):
        oneflow.env.get_local_rank()
    for key, text in {**LAUNCHED, "LOCAL_RANK": "0", "MASTER_PORT": "none"}.items():
        monkeypatch.setenv(key, text)
    with pytest.raises(zg.CommunicationError, match="MASTER_PORT is 'none'"):
        colossalai.launch_from_torch({})


NCCL_CONNECTS_AT_ONCE = hasattr(dist, "ProcessGroupNCCL") and hasattr(dist.ProcessGroupNCCL.Options(), "lazy_init")


@pytest.mark.skipif(not NCCL_CONNECTS_AT_ONCE, reason="before torch 2.15 NCCL connects at the first collective")
def test_nccl_connects_at_the_first_collective_on_the_gpu_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: groups.append(options))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for backend in (None, "gloo"):
        connect(1, 2, "tcp://127.0.0.1:29500", backend, 3)
    assert groups[0]["device_id"] == torch.device("cuda", 3)
    assert groups[0]["pg_options"].lazy_init
    assert "pg_options" not in groups[1]


def wait_for_what_hangs_up() -> str:
    """Rank 1 hangs up, then rank 0, whose connection to rank 1 is closed by then. Rank 2 waits for rank 0."""
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    rank, message = dist.get_rank(), ""
    if rank == 2:
        work = group.recv([torch.empty(1)], 0, 5)
        store.set("waits", "")
        try:
            work.wait(timedelta(seconds=60))
        except RuntimeError as error:
            message = str(error)
    else:
        store.wait(["waits"] if rank else ["1 has hung up"])
        hang_up(group)
        store.set(f"{rank} has hung up", "")
    store.set(f"{rank} is done", "")
    store.wait([f"{number} is done" for number in range(3)])
    return message


def test_a_rank_that_hangs_up_after_its_neighbour_ends_the_wait_of_a_third(pool: Pool) -> None:
    message = pool.run(3, wait_for_what_hangs_up)[2]
    assert message
    assert "Timed out" not in message


def meets_after_a_failure(file: str) -> int:
    """Rank 1 waits for a rank that does not come, and then meets rank 0, which has not."""
    store, rank = dist.FileStore(file, 2), dist.get_rank()
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_CONNECT_LIMIT", 0.2)
        if rank:
            with pytest.raises(RuntimeError):
                enter(dist.PrefixStore("alone", store), 0, 2)  # type: ignore[attr-defined]
        patch.setattr(process_group, "_CONNECT_LIMIT", 200.0)
        enter(dist.PrefixStore("together", store), rank, 2)  # type: ignore[attr-defined]
    return dist.get_world_size()


def test_ranks_meet_after_one_has_failed_to_connect(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, meets_after_a_failure, str(tmp_path / "store")) == [2, 2]
