"""Ranks that may be lost: processes forked for one call each, from the server of ``tests.pool``."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

# Seconds until a rank that neither answers nor ends is itself the failure; the machine may be busy with other tests.
PATIENCE = 240.0


@dataclass(frozen=True)
class Answer:
    """The value that a rank returned, or its traceback; ``value`` None and ``raised`` "" for a lost rank."""

    value: Any = None
    raised: str = ""


def run(ranks: int, lost: int | None, function: Callable[..., Any], *args: Any, store: str = "file") -> list[Answer]:
    """``function(*args)`` on every rank; waits for all but ``lost``, of which only an answer that is there is taken.

    Args:
        lost: None: none is, all are waited for.
        store: ``"file"``, or ``"tcp"``: one that rank 0 keeps in its own process; or ``"launcher"``: one that this
            process keeps, named in the environment as torchrun does, for the ranks to meet there themselves.
    """
    context = mp.get_context("forkserver")
    children = []
    with tempfile.TemporaryDirectory() as folder:
        where = f"tcp://127.0.0.1:{_free_port()}" if store == "tcp" else f"file://{folder}/store"
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if store == "launcher" else None
        where = where if kept is None else f"launcher://127.0.0.1:{kept.port}"
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, rank, ranks, where, function, args), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        try:
            answers = [_answer(ours, 0 if rank == lost else PATIENCE) for rank, (_, ours) in enumerate(children)]
            if lost is not None and answers[lost] == Answer():
                answers[lost] = _answer(children[lost][1], 0)
        finally:
            for child, ours in children:
                ours.close()
                # A stopped process ignores SIGTERM.
                child.kill()
                child.join()
    return answers


def _answer(connection: Connection, patience: float) -> Answer:
    with contextlib.suppress(EOFError, ConnectionResetError):
        if connection.poll(patience):
            found: Answer = connection.recv()
            return found
        return Answer(raised=f"no answer within {patience} s" if patience else "")
    return Answer()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _serve(
    connection: Connection, rank: int, ranks: int, where: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    kind, _, address = where.partition("://")
    if kind == "launcher":
        host, port = address.split(":")
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    else:
        os.environ.pop("RANK", None)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    try:
        answer = Answer(function(*args))
    except BaseException:
        answer = Answer(raised=traceback.format_exc())
    connection.send(answer)
    connection.close()


class Failing(fx.Interpreter):
    """Runs the emitted graph, but this rank meets its fault just before an operator."""

    def __init__(self, graph: fx.GraphModule, operator: str, happen: Callable[[], None]) -> None:
        super().__init__(graph)
        assert any(operator in str(node.target) for node in graph.graph.nodes), graph.graph
        self._operator, self._happen = operator, happen

    def run_node(self, node: fx.Node) -> Any:
        if self._operator in str(node.target):
            self._happen()
        return super().run_node(node)


def note_time(folder: str) -> None:
    """The fault happens now."""
    Path(folder, "lost").write_text(str(time.monotonic()))


def noted_time(folder: str) -> float:
    """When the fault happened, of the clock that all processes of a machine share."""
    return float(Path(folder, "lost").read_text())
