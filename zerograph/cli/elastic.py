"""The launcher of an elastic job: it starts processes, notices which are lost, and forms generations of the others.

A job of several hosts has a launcher on each. That of the first host has the store and forms the generations. Another
one tells it, by a key of the store, which of its workers live. If such a launcher is silent, all its workers count as
lost. If it loses the store, or learns that it counts as lost, it kills them: a host that is cut off does not train on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import typer

# Seconds between two looks, until a process that has just been started must have shown a sign of life, and in which a
# process that is told to end may do so.
_LOOK, _STARTED, _TERMINATED = 0.02, 600.0, 30.0
# The exit code of a worker that is lost with its host.
_WITH_HOST = 256
# Linux's request for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915


class LauncherError(Exception):
    """The launchers of a job do not meet, or have lost each other."""


@dataclass(eq=False)
class _Worker:
    """A worker: a process that may be a rank.

    Attributes:
        host: its host.
        process: the process, if it is one of this host.
        pipe: it writes its signs of life there.
        alive_at: when it wrote the last one, by ``time.monotonic()``.
        patience: seconds until a silent one counts as lost.
        code: its exit code; None while it lives.
    """

    host: str
    process: subprocess.Popen[bytes] | None = None
    pipe: int = -1
    alive_at: float = 0.0
    patience: float = _STARTED
    code: int | None = None


@dataclass(eq=False)
class _Launcher:
    """The launcher of another host, as the first one sees it.

    Attributes:
        heard_at: when it has told something new.
        told: the last that it has told; empty: it is about to.
        host: its host.
        workers: those that it has started.
    """

    heard_at: float
    told: bytes = b""
    host: str = ""
    workers: dict[str, _Worker] = field(default_factory=dict)


@dataclass(eq=False)
class Supervisor:
    """Run this host's part of a command on ``least`` to ``most`` ranks; see :mod:`zerograph.runtime.job.elastic`.

    Attributes:
        restarts: number of processes to start in place of lost ones of this host.
        patience: seconds without a sign of life until a process, or a host, counts as lost.
        each: number of processes that this host begins with.
        hosts: all hosts. The first one's launcher has the store.
        host: this one.
        port: of the store; 0: a free one.
        terms: what all launchers must have been told alike, by name.
    """

    command: Sequence[str]
    least: int
    most: int
    restarts: int
    patience: float
    each: int
    hosts: Sequence[str] = ("127.0.0.1",)
    host: str = "127.0.0.1"
    port: int = 0
    terms: Mapping[str, str] = field(default_factory=dict)
    _workers: dict[int, _Worker] = field(default_factory=dict)
    # The last generation: its number, workers, and number of ranks.
    _generation: tuple[int, tuple[int, ...], int] = (0, (), 0)
    _failed: bool = False
    # The launchers of other hosts that live, by number; how many have come; in which generation, and since when,
    # processes are too few.
    _launchers: dict[int, _Launcher] = field(default_factory=dict)
    _numbered: int = 0
    _short: tuple[int, float] = (-1, 0.0)
    # This launcher's number among those of other hosts, its address, and its workers' exit codes.
    _number: int = 0
    _address: str = ""
    _codes: dict[int, int | None] = field(default_factory=dict)

    def run(self) -> int:
        """Run until all processes have ended; return 0 if the job has finished, and none has failed after that.

        Raises:
            LauncherError: this host's launcher and the first one have lost each other, or never met.
        """
        self._is_first = self.host == self.hosts[0]
        self._store: Any = self._listen() if self._is_first else self._meet()
        self._began = time.monotonic()
        try:
            for _ in range(self.each):
                self._start()
            # Those that have not taken part when the job is over need not come so far.
            while self._workers and not (self._is_over() and self._workers.keys().isdisjoint(self._generation[1])):
                self._watch()
                if self._is_first:
                    self._hear()
                else:
                    self._tell()
                if self._is_first and not self._is_over():
                    self._form()
                time.sleep(_LOOK)
            return 0 if self._is_done() and not self._failed else 1
        except RuntimeError as error:
            if self._is_first:
                raise
            raise self._unreachable(error) from error
        finally:
            self._end(is_cut_off=isinstance(sys.exc_info()[1], LauncherError))

    def _end(self, *, is_cut_off: bool) -> None:
        """End the processes of this host, and say so to the launchers of the others."""
        own = [worker.process for worker in self._workers.values() if worker.process is not None]
        if self._is_first and not self._is_over():
            self._store.set("job is over", f"the launcher of the first host, {self.host}, has ended")
        for process in own:
            # They may wait for the first host.
            (process.kill if is_cut_off else process.terminate)()
        for process in own:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATED)
            process.kill()
        if not self._is_first and not is_cut_off:
            with contextlib.suppress(RuntimeError, LauncherError):
                self._tell(leaves=True)
        # The others read from the store how the job has ended.
        limit = time.monotonic() + self.patience
        while self._launchers and time.monotonic() < limit:
            self._hear()
            time.sleep(_LOOK)

    def _listen(self) -> Any:
        """Return the store, of this launcher; it listens on the address of this host alone.

        Raises:
            LauncherError: the address is another machine's, or the port is taken.
        """
        import torch.distributed as dist

        try:
            family, *_, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(place, family=family, backlog=1024)
            self._address, self.port = listening.getsockname()[:2]
            if len(self.hosts) > 1 and ip_address(self._address).is_loopback and self._address != self.host:
                raise OSError(0, f"it is {self._address} here, which no other host reaches (see /etc/hosts)")
        except OSError as error:
            raise LauncherError(
                f"the store cannot listen at {self.host}:{self.port}: {error.strerror}\n"
                "The first of --hosts is this machine's name or address for the others, and --port must be free."
            ) from error
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        store.set("terms", json.dumps(dict(self.terms)))
        return store

    def _meet(self) -> Any:
        """Return the store of the first host's launcher.

        Raises:
            LauncherError: there is none, or it was started for another job.
        """
        import torch.distributed as dist

        from zerograph.runtime.job.liveness import connections

        first, until = (self.hosts[0], self.port), time.monotonic() + self.patience
        while not self._address:
            try:
                with socket.create_connection(first, self.patience) as probe:
                    self._address = probe.getsockname()[0]
            except OSError as error:
                if isinstance(error, socket.gaierror) or time.monotonic() > until:
                    raise self._unreachable(error.strerror or error) from error
                time.sleep(10 * _LOOK)
        try:
            store = dist.TCPStore(*first, is_master=False, timeout=timedelta(seconds=self.patience))  # type: ignore[attr-defined]
            for number in connections(store):
                with socket.socket(fileno=os.dup(number)) as connection:
                    # No call waits longer than the first launcher waits for this one.
                    limit = struct.pack("ll", int(self.patience), 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            terms = json.loads(store.get("terms"))
            for name in self.terms:
                if terms.get(name) != self.terms[name]:
                    raise LauncherError(
                        f"{name} is {self.terms[name]} on {self.host}, and {terms.get(name)} on {self.hosts[0]}\n"
                        "Start all launchers with the same command but for --host, and the same script."
                    )
            self._number = store.add("launchers", 1) - 1
        except RuntimeError as error:
            raise self._unreachable(error) from error
        return store

    def _unreachable(self, why: object) -> LauncherError:
        return LauncherError(
            f"the launcher of the first host does not answer at {self.hosts[0]}:{self.port}: {why!s:.100}\n"
            "It does not run, its host is lost, or the network to it is cut. This host has no worker now. Start this "
            "launcher again to join the job. If the first one has ended, start all again: the job goes on from its "
            "last checkpoint."
        )

    def _is_done(self) -> bool:
        return bool(self._store.check(["done"]))

    def _is_over(self) -> bool:
        return self._is_done() or bool(self._store.check(["job is over"]))

    def _start(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        number = self._store.add("workers", 1) - 1
        variables = {
            "ZEROGRAPH_ELASTIC": f"{self.hosts[0]}:{self.port}",
            "ZEROGRAPH_WORKER": str(number),
            "ZEROGRAPH_PIPE": str(writing),
            "MASTER_ADDR": self.hosts[0],
            # The store is no rank's.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if len(self.hosts) > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = _interface(self._address)
        process = self._spawn(variables, writing)
        os.close(writing)
        self._workers[number] = _Worker(self.host, process, reading, time.monotonic())
        self._codes[number] = None

    def _spawn(self, variables: Mapping[str, str], pipe: int) -> subprocess.Popen[bytes]:
        """Start a process that inherits the pipe."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
        return subprocess.Popen(self.command, env=environment, pass_fds=[pipe])

    def _watch(self) -> None:
        """Look for processes that have ended or are silent; start others in their place."""
        now = time.monotonic()
        for number, worker in list(self._workers.items()):
            if worker.process is not None:
                with contextlib.suppress(BlockingIOError):
                    if os.read(worker.pipe, 4096):
                        worker.alive_at, worker.patience = now, self.patience
                worker.code = worker.process.poll()
                if worker.code is None and now - worker.alive_at > worker.patience:
                    silent = f"worker {number} is silent for {worker.patience:g} seconds: killed"
                    typer.echo(f"zerograph: {silent}", err=True)
                    worker.process.send_signal(signal.SIGKILL)
                    worker.code = worker.process.wait()
            if worker.code is not None:
                self._lost(number, worker.code)

    def _tell(self, *, leaves: bool = False) -> None:
        """Tell the first host's launcher which workers live, and read which generation it has formed.

        Raises:
            LauncherError: this host counts as lost.
        """
        self._store.set(f"launcher/{self._number}", json.dumps([self.host, time.monotonic(), leaves, self._codes]))
        if self._store.check([f"launcher lost/{self._number}"]):
            why = self._store.get(f"launcher lost/{self._number}").decode()
            raise LauncherError(f"this host counts as lost: {why}\nStart its launcher again to join the job.")
        if self._store.check(["generation"]):
            number, workers, ranks, _ = json.loads(self._store.get("generation"))
            self._generation = number, tuple(workers), ranks

    def _hear(self) -> None:
        """Read what the launchers of other hosts tell. The last launcher of a host counts."""
        now = time.monotonic()
        while self._numbered < self._store.add("launchers", 0):
            self._launchers[self._numbered] = _Launcher(now)
            self._numbered += 1
        for number, launcher in list(self._launchers.items()):
            told = self._store.get(f"launcher/{number}") if self._store.check([f"launcher/{number}"]) else b""
            if told == launcher.told:
                if now - launcher.heard_at > self.patience:
                    self._lose(number, f"its launcher is silent for {self.patience:g} seconds")
                continue
            host, _, leaves, codes = json.loads(told)
            if not launcher.told:
                for earlier in [one for one in self._launchers if self._launchers[one].host == host]:
                    self._lose(earlier, "another launcher of it has come")
                typer.echo(f"zerograph: host {host} has come, with {len(codes)} process(es)", err=True)
            launcher.heard_at, launcher.told, launcher.host = now, told, host
            for worker in codes.keys() - launcher.workers.keys():
                self._workers[int(worker)] = launcher.workers[worker] = _Worker(host)
            for worker, code in codes.items():
                launcher.workers[worker].code = code
            if leaves:
                self._lose(number, "its launcher has ended")

    def _lose(self, number: int, why: str) -> None:
        launcher = self._launchers.pop(number)
        self._store.set(f"launcher lost/{number}", why)
        if launcher.told and not self._is_over():
            typer.echo(f"zerograph: host {launcher.host} is lost: {why}", err=True)
        for worker in launcher.workers.values():
            worker.code = _WITH_HOST if worker.code is None else worker.code

    def _lost(self, number: int, code: int) -> None:
        worker, self._codes[number] = self._workers.pop(number), code
        self._store.delete_key(f"want/{number}")
        if worker.process is not None:
            os.close(worker.pipe)
        if code == 0 and self._is_done():
            return
        generation, workers, ranks = self._generation
        if number in workers and self._is_first:
            self._store.set(f"broken/{generation}", "")
        place = f", rank {workers.index(number)} of {ranks} in generation {generation}" if number in workers else ""
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        how = f"is lost with its host {worker.host}" if code == _WITH_HOST else how
        when = " after the end of training" if self._is_done() else ""
        typer.echo(f"zerograph: worker {number}{place} {how}{when}; {len(self._workers)} left", err=True)
        if self._is_done():
            self._failed = True
        elif worker.process is not None and self.restarts and not self._is_over():
            self.restarts -= 1
            self._start()

    def _waiting(self) -> dict[int, int | None]:
        """Return the living workers that wait for the next generation, each with the most ranks that it can run on."""
        wants = {number: f"want/{number}" for number in self._workers}
        return {number: json.loads(self._store.get(key)) for number, key in wants.items() if self._store.check([key])}

    def _form(self) -> None:
        """Form the next generation once all that are left of the last one wait, or tell it that it may grow."""
        generation, workers, ranks = self._generation
        waiting = self._waiting()
        starting = [number for number in self._workers if number not in waiting]
        busy = [number for number in starting if number in workers or not workers]
        if busy:
            training = sum(number in workers[:ranks] for number in busy)
            if generation and training == ranks and self._ranks(training + len(waiting), waiting) > ranks:
                self._store.set(f"grow/{generation}", "")
            return
        now, hosts_lack = time.monotonic(), len(self._launchers) + 1 < len(self.hosts)
        if hosts_lack and not generation and now < self._began + self.patience:
            return
        # Those that hold snapshots first, in the order of their ranks.
        order = [number for number in workers if number in waiting]
        order += [number for number in sorted(waiting) if number not in workers]
        ranks = self._ranks(len(order), waiting)
        if ranks:
            # All that live have left the earlier generations.
            for key in self._store.list_keys():
                if key.startswith(("generation ", "broken/", "grow/")) or key in {f"want/{number}" for number in order}:
                    self._store.delete_key(key)
            self._generation = generation + 1, tuple(order), ranks
            hosts = [self._workers[number].host for number in order]
            self._store.set("generation", json.dumps([*self._generation, hosts]))
        elif not starting:
            message = f"{len(order)} process(es) are left, which are too few for {self.least} to {self.most} ranks"
            most = next(iter(waiting.values()), None)
            message += "" if most is None else f" and config.virtual_ranks = {most}"
            if hosts_lack and self._short[0] != generation:
                self._short = generation, now
                typer.echo(f"zerograph: {message}; another host may come in the next {_STARTED:g} seconds", err=True)
            if hosts_lack and now < self._short[1] + _STARTED:
                return
            self._store.set("job is over", f"the job cannot go on: {message}")
            typer.echo(f"zerograph: {message}", err=True)

    def _ranks(self, available: int, waiting: dict[int, int | None]) -> int:
        """Return the most ranks that as many processes allow, or 0."""
        ranks = min(available, self.most, next(iter(waiting.values()), None) or available)
        return ranks if ranks >= self.least else 0


def _interface(address: str) -> str:
    """Return the name of the network interface that has an address.

    Raises:
        LauncherError: none has it.
    """
    number, others = ip_address(address).packed, Path("/proc/net/if_inet6")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == number:
                    return name
    for line in others.read_text().splitlines() if others.exists() else ():
        if bytes.fromhex(line.split()[0]) == number:
            return line.split()[-1]
    raise LauncherError(f"no network interface has {address}: set GLOO_SOCKET_IFNAME to that between the hosts")
