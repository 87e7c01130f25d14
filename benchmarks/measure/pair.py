"""Starts the processes of one contender, waits for them, and gathers what each of them wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.measure.hosts import Host, environment, host_of

ROOT = Path(__file__).resolve().parents[2]
# glibc keeps freed blocks; so peak memory is measured with every block of 128 KiB or more given back when freed.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def measure(
    contender: Contender, task: str, kind: str, steps: int, cache: Path, patience: float, hosts: Sequence[Host] = ()
) -> dict[str, Any]:
    """``{"ranks": [...]}``, one entry for each process, or ``{"skipped": reason}``, or ``{"failed": reason}``.

    Args:
        kind: ``"time"`` or ``"memory"``.
        cache: Inductor's, of this contender: empty for a cold start. What others build goes beside it.
        patience: seconds until the processes are ended.
        hosts: where the processes run, in equal parts; none: on this machine. Processes may remain on them at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(contender.ranks)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(contender.ranks)]
        shared = {
            **os.environ,
            **(GIVE_BACK if kind == "memory" else {}),
            **({"ZEROGRAPH_WIRE": "sockets"} if contender.sockets else {}),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # DeepSpeed builds an operator here, under a lock that a killed process leaves behind.
            "TORCH_EXTENSIONS_DIR": str(cache.parent / "extensions"),
        }
        port = _free_port()
        processes = []
        for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
            command = [sys.executable, "-m", "benchmarks.measure.worker", contender.name, task, kind, str(steps), out]
            if hosts:
                place = environment(hosts, rank, contender.ranks)
                command = [*host_of(hosts, rank, contender.ranks).enter(ROOT), *command]
            else:
                place = _environment(rank, contender.ranks, port)
            with log.open("w") as file:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=shared | place, stdout=file, stderr=file))
        problem = _wait(processes, patience)
        if problem:
            return {"failed": f"{problem}: {_last_line(logs)}"}
        ranks = [json.loads(out.read_text()) for out in outs]
    skipped = next((rank for rank in ranks if "skipped" in rank), None)
    return skipped or {"ranks": ranks}


def run(command: Sequence[str], ranks: int, patience: float, hosts: Sequence[Host]) -> str:
    """Run a command as each rank of a job on the hosts; return the error, or an empty text."""
    processes = []
    for rank in range(ranks):
        place = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment(hosts, rank, ranks)}
        entered = [*host_of(hosts, rank, ranks).enter(ROOT), *command]
        processes.append(subprocess.Popen(entered, env=place, stdout=subprocess.DEVNULL))
    return _wait(processes, patience)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    number, size = str(rank), str(ranks)
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _wait(processes: list[subprocess.Popen[bytes]], patience: float) -> str:
    """Return the error, if any; then none of the processes runs any more."""
    limit = time.monotonic() + patience
    try:
        while any(one.poll() is None for one in processes):
            failed = [(rank, one.poll()) for rank, one in enumerate(processes) if one.poll()]
            if failed:
                return f"rank {failed[0][0]} ended with status {failed[0][1]}"
            if time.monotonic() > limit:
                return f"no end after {patience:g} seconds"
            time.sleep(0.05)
    finally:
        for one in processes:
            if one.poll() is None:
                one.kill()
                one.wait()
    failed = [(rank, one.returncode) for rank, one in enumerate(processes) if one.returncode]
    return f"rank {failed[0][0]} ended with status {failed[0][1]}" if failed else ""


def _last_line(logs: list[Path]) -> str:
    """The last error that any rank wrote."""
    for log in logs:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        if lines:
            return lines[-1].strip()
    return "it wrote no error"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
