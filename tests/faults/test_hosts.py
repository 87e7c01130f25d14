"""Faults of a wire between two hosts: the error names the host that is lost, and comes in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.measure.hosts import Host, environment, two_hosts, unavailable

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]

ROOT = Path(__file__).parents[2]
TIMEOUT = 15.0
# Beyond the limit: asking who is there, and what a busy machine adds.
LITTLE_MORE = 25.0
PATIENCE = 240.0
# A step sends 12 MB each way: a tenth of a second at 1 Gbit/s.
SCRIPT = f"""
import sys, time, torch, zerograph as zg

class TrainStep(zg.ZeroGraph):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 2048))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.config.zero.stage = 2
        self.config.checks.timeout = {TIMEOUT}

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

step, x = TrainStep(), torch.randn(8, 1024, generator=torch.Generator().manual_seed(zg.rank()))
try:
    for number in range(int(sys.argv[1])):
        loss = float(step(x))
        print("step", number, loss, flush=True)
except zg.CommunicationError as error:
    print("lost at", time.monotonic(), error, flush=True)
    raise SystemExit(1)
"""


class Ranks:
    """One rank on each host, running the script; what it prints is in files.

    A context, at whose end no process runs: a stopped ``nsenter`` would keep its host from ending.
    """

    def __init__(self, hosts: tuple[Host, Host], folder: Path, steps: int) -> None:
        self.logs = [folder / f"{rank}.log" for rank in range(2)]
        self.processes = []
        plain = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for rank, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            command = [*host.enter(), sys.executable, "-c", SCRIPT, str(steps)]
            with log.open("w") as file:
                place = plain | environment(hosts, rank, 2)
                self.processes.append(subprocess.Popen(command, env=place, stdout=file, stderr=file))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for(self, text: str) -> None:
        """Wait until rank 0 has printed a text."""
        limit = time.monotonic() + PATIENCE
        while text not in self.logs[0].read_text():
            assert self.processes[0].poll() is None, self.logs[0].read_text()
            assert time.monotonic() < limit, self.logs[0].read_text()
            time.sleep(0.02)

    def end(self, rank: int) -> str:
        """Wait until a rank has ended with an error and return what it printed."""
        assert self.processes[rank].wait(PATIENCE) == 1, self.logs[rank].read_text()
        return self.logs[rank].read_text()


def noted_time(said: str) -> float:
    """Return when a rank raised its error, of the clock that all processes of a machine share."""
    return float(said.split("lost at ")[1].split()[0])


def cut(host: Host) -> None:
    host.cut()


def pause(host: Host) -> None:
    host.signal(signal.SIGSTOP)


@pytest.mark.parametrize("fault", [cut, pause])
def test_a_lost_host_is_named_in_time(tmp_path: Path, fault: Callable[[Host], None]) -> None:
    with two_hosts("1gbit") as hosts, Ranks(hosts, tmp_path, steps=100_000) as ranks:
        ranks.wait_for("step 5 ")
        # In the middle of a step.
        time.sleep(0.05)
        began = time.monotonic()
        fault(hosts[1])
        said = ranks.end(0)
        assert noted_time(said) - began < TIMEOUT + LITTLE_MORE
        assert "rank 0 of 2 lost rank 1 on host1 while in" in said
        assert "the network to it is cut" in said
        if fault is cut:
            # The other side has lost the host of the store.
            assert "rank 1 of 2 lost rank 0 on host0 while in" in ranks.end(1)


def losses(folder: Path, rate: str | None) -> list[str]:
    """Print ten steps; after the third the wire has another rate."""
    folder.mkdir()
    with two_hosts("1gbit") as hosts, Ranks(hosts, folder, steps=10) as ranks:
        ranks.wait_for("step 2 ")
        for host in hosts if rate is not None else ():
            host.shape(rate)
        assert [process.wait(PATIENCE) for process in ranks.processes] == [0, 0]
        return [line for line in ranks.logs[0].read_text().splitlines() if line.startswith("step")]


def test_a_wire_of_a_tenth_of_its_rate_is_slow_and_nothing_else(tmp_path: Path) -> None:
    slow, fast = losses(tmp_path / "slow", "100mbit"), losses(tmp_path / "fast", None)
    assert len(fast) == 10
    assert slow == fast


def test_a_wire_too_slow_for_the_timeout_names_the_other_host(tmp_path: Path) -> None:
    with two_hosts("1gbit") as hosts, Ranks(hosts, tmp_path, steps=100_000) as ranks:
        ranks.wait_for("step 5 ")
        began = time.monotonic()
        for host in hosts:
            # A step needs more than a minute.
            host.shape("1mbit")
        said = [ranks.end(rank) for rank in range(2)]
    for rank, text in enumerate(said):
        assert f"rank {1 - rank} on host{1 - rank}" in text
    for text in said:
        assert noted_time(text) - began < TIMEOUT + LITTLE_MORE
