"""Scripts on the pool's ranks, started as torchrun would start them, but in processes that have imported everything."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing as mp
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import zerograph as zg
from tests.pool import Pool


def run_script(
    pool: Pool, ranks: int, script: Path, *options: str, run: Callable[..., tuple[str, list[str]]] | None = None
) -> list[tuple[str, list[str]]]:
    """Return what the script prints on each rank, and what zerograph warns of; its rendezvous is its own.

    Args:
        run: calls :func:`run_as_rank` with the arguments that it is called with; default: that function itself.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return pool.run_afresh(ranks, run or run_as_rank, port, str(script), options)


def run_by_torchruns_agent(logs: Path, arguments: list[str], restarts: int = 0) -> dict[str, str]:
    """Run a script on two ranks that torchrun's agent starts, but forks off a process that has imported everything.

    Args:
        logs: folder for what the ranks print.
        arguments: those of the script, its path first.
        restarts: how often the agent starts the ranks again.

    Returns:
        What the ranks of the last start print to ``"stdout"`` and ``"stderr"``.
    """
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=logs.parent.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(str(logs), redirects=Std.ALL),
    )
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        elastic_launch(agent, _run_in_this_process)(arguments)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    last = max(logs.glob("*/attempt_*"))
    return {
        name: "".join(path.read_text() for path in sorted(last.glob(f"*/{name}.log"))) for name in ("stdout", "stderr")
    }


def run_apart(function: Callable[..., None], *args: Any) -> int | None:
    """Call a function in a process of its own, which ends as one of Python does; return its exit code."""
    process = mp.get_context("forkserver").Process(target=_run_to_the_end, args=(function, args))
    process.start()
    process.join()
    return process.exitcode


def _run_to_the_end(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    function(*args)
    # Forked processes leave this out.
    atexit._run_exitfuncs()


def _run_in_this_process(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def run_as_rank(port: int, script: str, options: tuple[str, ...]) -> tuple[str, list[str]]:
    """Run the script in this process, as torchrun would start it."""
    rank, ranks = str(zg.rank()), str(zg.world_size())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.destroy_process_group()
    printed, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [script, *options])
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(script, run_name="__main__")
        finally:
            signal.signal(signal.SIGTERM, before)
    return printed.getvalue(), [str(one.message) for one in seen if issubclass(one.category, UserWarning)]
