"""Steps of zerograph on the backend "eager" that train a task, and processes that are the ranks of a job."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contenders.tasks import Task
from benchmarks.contenders.zerograph import TrainStep
from benchmarks.measure.hosts import Host, environment, host_of


def eager_step(task: Task, stage: int = 0, **options: Any) -> TrainStep:
    """Return a step with fused AdamW.

    Args:
        task: what is trained.
        stage: the ZeRO stage; 0: off.
        options: further options of its configuration.
    """
    step = TrainStep(task, task.model())
    step.config.zero.stage = stage
    step.config.backend = "eager"
    step.config.set(**options)
    return step


def run_ranks(
    command: Sequence[str], ranks: int, variables: Mapping[str, str] | None = None, hosts: Sequence[Host] = ()
) -> list[str]:
    """Run a command as each rank of a job, with one thread; return what each has printed.

    Args:
        command: the command.
        ranks: number of processes.
        variables: further environment variables.
        hosts: where they run, in equal parts; none: on this machine.

    Raises:
        SystemExit: a rank has failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        place = number | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        entered = list(command)
        if hosts:
            place, entered = environment(hosts, rank, ranks), [*host_of(hosts, rank, ranks).enter(), *command]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        processes.append(subprocess.Popen(entered, env=shared | place, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank has failed: {' '.join(command)}")
    return printed
