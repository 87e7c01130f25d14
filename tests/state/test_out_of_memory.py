"""Training what does not fit: the optimizer's state alone, or the model alone, is more than a process may have."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares, told
from tests.models import update_by
from tests.pool import Pool
from zerograph.runtime.job.process_group import join, reporting_failures
from zerograph.runtime.wire import collectives

WIDTH, LAYERS, MANY = 1024, 16, 40
LAYER = 4 * WIDTH**2
PARAMETERS = LAYER * LAYERS


class Step(LossStep):
    def __init__(self, model: nn.Module, folder: str) -> None:
        super().__init__(model, adamw(model), 3, mean_of_squares, bucket_size=LAYER)
        self.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", folder))


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True)


def plainly(model: nn.Module, update: torch.optim.Optimizer, x: Tensor, steps: int) -> list[float]:
    return [update_by(update, model(x).square().mean()).item() for _ in range(steps)]


def trained_within_a_limit(folder: str) -> dict[str, Any]:
    x = torch.ones(2, WIDTH)
    # What the first step of a process takes once and for all: imports, threads, tables.
    Step(layers(2), folder)(x)
    ours, theirs = layers(LAYERS), layers(LAYERS)
    left = 2 * PARAMETERS - 2**20
    with limited(left):
        try:
            found: dict[str, Any] = {"plain": plainly(theirs, adamw(theirs), x, 1)}
        except (RuntimeError, MemoryError) as error:
            found = {"plain": str(error)}
        found |= {"state": 2 * PARAMETERS, "left": left}
        theirs.zero_grad()
        step = Step(ours, folder)
        found["ours"] = [step(x).item() for _ in range(3)]
    model = layers(LAYERS)
    found["wanted"] = plainly(model, adamw(model), x, 3)
    return found


@contextmanager
def limited(left: int) -> Iterator[None]:
    """So many bytes the process may take beside what it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def trained_apart(folder: Path) -> dict[str, Any]:
    """The same in a process of its own."""
    (found,) = apart(f"trained_within_a_limit({str(folder)!r})", ranks=1)
    return found


def apart(call: str, ranks: int) -> list[dict[str, Any]]:
    """Return what a function of this module returns on each rank; each is a process of its own."""
    script = f"import json; from {__name__} import *; print(json.dumps({call}))"
    # The limit counts address space: what is freed is to be given back, and no more set aside than is used.
    settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16), "OMP_NUM_THREADS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings, **job, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if job else {})},
        )
        for rank in range(ranks)
    ]
    ended = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0] * ranks, ended
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


@pytest.mark.long
def test_state_that_does_not_fit_rests_in_files(tmp_path: Path) -> None:
    found = trained_apart(tmp_path)
    assert "can't allocate memory" in found["plain"]
    torch.testing.assert_close(found["ours"], found["wanted"])


class Split(LossStep):
    """Without optimizer state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, sgd(model), 3, mean_of_squares, bucket_size=LAYER)


def deep(count: int) -> nn.Module:
    """As large at its end as at its beginning."""
    model = layers(count)
    for weight in model.parameters():
        nn.init.normal_(weight, std=WIDTH**-0.5)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def split(count: int) -> nn.Module:
    with zg.sharded_init():
        return deep(count)


def made_and_trained_within_a_limit() -> dict[str, Any]:
    """As one of three ranks, each with less room than the parameters take, of which its parts and gradients are 2/3."""
    x = torch.ones(1, WIDTH) * (1 + zg.rank())
    Split(split(2))(x)
    found: dict[str, Any] = {}
    with limited(MANY * LAYER - 2**20):
        try:
            deep(MANY)
        except (RuntimeError, MemoryError) as error:
            found["plain"] = str(error)
        step = Split(split(MANY))
        found["ours"] = [step(x).item() for _ in range(3)]
    return found


@pytest.mark.long
def test_a_model_larger_than_a_ranks_memory_is_made_and_trained() -> None:
    model, x = deep(MANY), torch.ones(3, WIDTH) * torch.tensor([[1.0], [2.0], [3.0]])
    wanted = plainly(model, sgd(model), x, 3)
    assert wanted[2] < wanted[0]
    for found in apart("made_and_trained_within_a_limit()", ranks=3):
        assert "can't allocate memory" in found["plain"]
        torch.testing.assert_close(found["ours"], wanted)


def noted_without_threads() -> str:
    """Return the error of this rank, which can start no further thread."""
    job = join(60.0)
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        try:
            with reporting_failures(job, "training"):
                raise MemoryError("nothing is left")
        except (MemoryError, RuntimeError) as error:
            return str(error)


def test_an_error_for_want_of_memory_is_not_hidden_by_another(pool: Pool) -> None:
    assert pool.run(2, noted_without_threads) == ["nothing is left"] * 2


def gathered_without_memory() -> tuple[str, str]:
    """Return the errors of a gather for which rank 0 has no memory, and of the step after it."""
    step, x = Split(layers(1)), torch.ones(1, WIDTH)
    step(x)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    fails = patch.object(collectives, "gather_pieces", side_effect=error) if zg.rank() == 0 else nullcontext()
    with fails, pytest.raises(RuntimeError) as caught:
        step.state_dict()
    return str(caught.value), told(lambda: step(x))[1]


def test_a_rank_without_memory_for_a_gather_says_so_and_none_goes_on(pool: Pool) -> None:
    (own, own_next), (other, other_next) = pool.run_afresh(2, gathered_without_memory)
    assert own == "DefaultCPUAllocator: can't allocate memory"
    assert "lost rank 0" in other
    assert "rank 0: failed, gathering state outside a step: RuntimeError: DefaultCPUAllocator" in other
    for words in (own_next, other_next):
        assert "rank 1: gathering state outside a step, rank 1" in words
