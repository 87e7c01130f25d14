"""The protocol by which ranks find out who is at fault: how often it uses the store."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from zerograph.runtime.job.liveness import Liveness
from zerograph.runtime.job.reports import ENDED, Answers, Report, name_ranks

SIZE, CLIENTS = 16_384, 64


class CountingStore:
    """A store in memory that counts operations."""

    def __init__(self) -> None:
        self.store, self.operations = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def count(*args: Any) -> Any:
            self.operations += name != "has_extended_api"
            return method(*args)

        return count


def test_ranks_of_a_large_job_use_the_store_less_than_a_thousand_times_per_second() -> None:
    store = CountingStore()
    clients = [Liveness(rank, SIZE, store) for rank in range(0, SIZE, SIZE // CLIENTS)]
    for client in clients:
        with client.busy("step 1"):
            client._check(store)
    assert store.operations / CLIENTS * SIZE / clients[0]._interval < 1000
    # They still see an inquiry, once.
    number = clients[0]._inquire()
    for _ in range(2):
        before = store.operations
        clients[1]._check(store)
    assert store.check([f"answer/{number}/{clients[1].rank}"])
    assert store.operations - before == 2


class LateStore(CountingStore):
    """A store that answers once it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        self.store.set(key, value)


def test_a_store_that_was_late_or_could_not_be_asked_is_asked_again() -> None:
    store = LateStore()
    liveness = Liveness(1, 2, store)
    liveness.report_failure(ValueError("late"))
    store.answers.set()
    for thread in liveness._threads:
        thread.join()
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        liveness.report_failure(MemoryError("unable to start a thread"))
    assert b"late" in store.get("last/1")
    liveness.report_failure(ValueError("in time"))
    assert b"in time" in store.get("last/1")


SCRIPT = """
import sys, threading, time
import torch.distributed as dist
from zerograph.runtime.job.liveness import start_liveness

class Slow:
    # Collected while Python ends; waits in it without the interpreter's lock.
    def __del__(self):
        print("ending", flush=True)
        time.sleep(1.0)

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
liveness = start_liveness(dist.group.WORLD)
print("started", flush=True)
sys.stdin.readline()
assert liveness._in_time(lambda: liveness.store.add("key", 1), 0.2) is None
dist.kept, liveness = Slow(), None
"""


class Wire:
    """A connection to a server through this process, which can stop to pass on answers."""

    def __init__(self, port: int) -> None:
        self._server, self.passes = port, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.passes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                threading.Thread(target=self._copy, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, self.passes), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, passes: threading.Event | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if passes is not None:
                    passes.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


def start_rank(port: int, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(port), str(rank)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_store_that_answers_while_the_process_ends_does_not_abort_it() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wire = Wire(server.port)
    processes = [start_rank(port, rank) for rank, port in enumerate([wire.port, server.port])]
    try:
        assert [read_line(process) for process in processes] == ["started\n"] * 2
        wire.passes.clear()
        assert processes[0].stdin is not None
        processes[0].stdin.write("\n")
        processes[0].stdin.flush()
        assert read_line(processes[0]) == "ending\n"
        wire.passes.set()
        assert processes[0].wait(30.0) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        wire.close()


def test_a_rank_whose_script_has_ended_is_named_as_that() -> None:
    ended, failed = Report("outside of the graph, after step 3", ENDED), Report("step 4", "ValueError: no")
    answers = Answers(0, "state_dict()", {1: ended, 2: failed})
    assert answers.has_ended([1])
    assert not answers.has_ended([1, 2])
    first, second = answers.lines(name_ranks)
    assert first == "rank 1: outside of the graph, after step 3: its script has ended, without an error"
    assert second == "rank 2: failed, step 4: ValueError: no"
