"""The launcher of an elastic job: it starts processes, notices which are lost, and forms generations of the others.

A job of several hosts has a launcher on each. That of the first host leads: it has the store and forms the generations.
Another one tells it, by a key of the store, which of its workers live. If such a launcher is silent, all its workers
count as lost. If it loses the store, or learns that it counts as lost, it kills them: a host that is cut off does not
train on. With a folder that all hosts have, the launcher of the next host leads when the store is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import typer

# Seconds between two looks, until a process that has just been started must have shown a sign of life, in which a
# process that is told to end may do so, between two signs of a launcher in a folder, and for an answer by the network.
_LOOK, _STARTED, _TERMINATED, _SIGN, _ANSWERS = 0.02, 600.0, 30.0, 1.0, 2.0
# How many times its patience a launcher waits that has lost most of the processes with their hosts.
_FEW_WAIT = 3
# More than the workers of a job that a launcher may not know.
_MANY = 10_000
# The exit code of a worker that is lost with its host.
_WITH_HOST = 256
# Linux's request for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915


class LauncherError(Exception):
    """The launchers of a job do not meet, or have lost each other."""


class _SilentError(LauncherError):
    """The launcher that leads does not answer."""


class _Generation(NamedTuple):
    """A generation, as :class:`zerograph.runtime.job.elastic.Generation` has it."""

    number: int = 0
    workers: Sequence[int] = ()
    ranks: int = 0
    hosts: Sequence[str] = ()


@dataclass(eq=False)
class _Claims:
    """A folder that all hosts have, with a file for each generation.

    Of two launchers that do not reach each other, and would both go on, one writes the file of the next generation.
    """

    folder: Path

    def _file(self) -> Path | None:
        return max(self.folder.glob("generation-*"), default=None)

    def newest(self) -> _Generation:
        """Return the last generation that was claimed."""
        file = self._file()
        return _Generation() if file is None else _Generation(*json.loads(file.read_text()))

    def claim(self, generation: _Generation) -> None:
        """Write the file of a generation.

        Raises:
            LauncherError: another launcher has written one, or it cannot be written.
        """
        mine = self.folder / f".{os.getpid()}.{generation.hosts[0]}"
        try:
            mine.write_text(json.dumps(generation))
            os.link(mine, self.folder / f"generation-{generation.number:09}")
            mine.unlink()
        except FileExistsError as error:
            raise LauncherError(
                f"generation {generation.number} was formed without this host, by a launcher that it does not reach\n"
                "Start its launcher again to join the job."
            ) from error
        except OSError as error:
            raise LauncherError(f"--shared {self.folder}: {error.strerror}") from error

    def sign(self, *, last: bool = False) -> None:
        """Show that the launcher that leads lives, or that none leads any more."""
        # The next sign may come through.
        with contextlib.suppress(OSError):
            if (file := self._file()) is not None:
                os.utime(file, (0, 0) if last else None)

    def signed_at(self) -> float:
        """Return when the last sign was given; 0: no launcher leads."""
        file = self._file()
        return 0.0 if file is None else file.stat().st_mtime


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
        hosts: all hosts. The first one's launcher leads.
        host: this one.
        port: of the store; 0: a free one.
        terms: what all launchers must have been told alike, by name.
        shared: a folder that all hosts have, by which the next one leads if the first is lost; None: none does.
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
    shared: Path | None = None
    _workers: dict[int, _Worker] = field(default_factory=dict)
    # The last generation.
    _generation: _Generation = field(default_factory=_Generation)
    _failed: bool = False
    # How far the job has come, as far as this launcher knows.
    _states: set[str] = field(default_factory=set)
    # The host whose launcher leads, and when it answered last, or gave a sign. If it is this one: from when on it may
    # form a generation, and the hosts for which it waits.
    _leader: str = ""
    _answered_at: float = 0.0
    _began: float = 0.0
    _awaited: set[str] = field(default_factory=set)
    # Since when only a minority of the last generation's processes is of hosts that are here; 0: more are.
    _few_since: float = 0.0
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
            LauncherError: this host's launcher and the one that leads have lost each other, or never met.
        """
        self._claims = None if self.shared is None else _Claims(self.shared)
        self._begin()
        try:
            for _ in range(self.each):
                self._start()
            while self._goes_on():
                time.sleep(_LOOK)
            return 0 if self._is_done() and not self._failed else 1
        except RuntimeError as error:
            if self._leads:
                raise
            raise self._unreachable(error) from error
        finally:
            self._end(is_cut_off=isinstance(sys.exc_info()[1], LauncherError))

    @property
    def _leads(self) -> bool:
        return self._leader == self.host

    def _begin(self) -> None:
        """Meet the launcher that leads; on the first host lead, if none does."""
        others = [host for host in self.hosts if host != self.host]
        if self.host != self.hosts[0]:
            self._meet(self.hosts[:1] if self._claims is None else others, self.patience)
            return
        if self._claims is not None and (signed_at := self._claims.signed_at()):
            # The job may go on without this host.
            try:
                self._meet(others, self.patience)
                return
            except _SilentError:
                if self._claims.signed_at() > signed_at:
                    raise
        if self._claims is not None:
            self._generation = _Generation(self._claims.newest().number)
        self._lead(self.hosts)

    def _lead(self, awaited: Iterable[str], silent: float = 0.0) -> None:
        self._store = self._listen()
        self._leader, self._began, self._awaited = self.host, time.monotonic() + silent, set(awaited)

    def _goes_on(self) -> bool:
        """Look at this host's processes and the other launchers; return whether there is more to do."""
        try:
            # Those that have not taken part when the job is over need not come so far.
            if not self._workers or (self._is_over() and self._workers.keys().isdisjoint(self._generation.workers)):
                return False
            self._watch()
            if not self._leads:
                self._tell()
                return True
            self._hear()
            if not self._is_over():
                self._form()
        except RuntimeError as error:
            if self._leads:
                raise
            self._succeed(error)
        return True

    def _succeed(self, error: RuntimeError) -> None:
        """Go on without the store: meet the launcher of the next host that answers, or lead."""
        if self._states & {"done", "job is over"}:
            return
        if self._claims is None:
            raise self._unreachable(error) from error
        lost, silent = self._leader, time.monotonic() - self._answered_at
        typer.echo(f"zerograph: host {lost} is lost: its launcher does not answer", err=True)
        at = self.hosts.index(lost)
        self._codes = dict.fromkeys(self._workers)
        for host in [*self.hosts[at + 1 :], *self.hosts[:at]]:
            if host == self.host:
                break
            with contextlib.suppress(_SilentError):
                # It may notice the loss so much later.
                self._meet([host], 2 * self.patience)
                break
        if self._leader == lost:
            if self._generation.number and not self._claims.signed_at():
                raise LauncherError("the job has ended without this host")
            newest = self._claims.newest()
            if newest.number > self._generation.number and self.host in newest.hosts:
                # The launcher is lost that has just formed it.
                self._generation = newest
            # One that is only cut off comes first.
            self._lead({*(self._generation.hosts or self.hosts)} - {lost}, silent)
            self._store.add("workers", 1 + max([*self._generation.workers, *self._workers], default=0) + _MANY)
            for state in [*self._states, f"broken/{self._generation.number}"]:
                self._store.set(state, "")
            # For workers that have not seen it: they leave it, too.
            self._store.set("generation", json.dumps(self._generation))
        typer.echo(f"zerograph: the launcher of host {self._leader} leads", err=True)
        for worker in self._workers.values():
            # Some have ended.
            with contextlib.suppress(BrokenPipeError):
                os.write(worker.pipe, f"{self._leader}:{self.port}\n".encode())

    def _end(self, *, is_cut_off: bool) -> None:
        """End the processes of this host, and say so to the launchers of the others."""
        own = [worker.process for worker in self._workers.values() if worker.process is not None]
        if self._leads and not self._is_over():
            self._store.set("job is over", f"the launcher of the host that leads, {self.host}, has ended")
        if self._leads and self._claims is not None and not is_cut_off:
            self._claims.sign(last=True)
        for process in own:
            # They may wait for the host that leads.
            (process.kill if is_cut_off else process.terminate)()
        for process in own:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATED)
            process.kill()
        if not self._leads and not is_cut_off:
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
                "--hosts has this machine's name or address for the others, and --port must be free."
            ) from error
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        store.set("terms", json.dumps(dict(self.terms)))
        return store

    def _meet(self, hosts: Sequence[str], seconds: float) -> None:
        """Connect to the store of that one of the hosts whose launcher leads.

        Raises:
            _SilentError: none answers for so many seconds.
            LauncherError: it was started for another job.
        """
        import torch.distributed as dist

        from zerograph.runtime.job.liveness import connections

        until = time.monotonic() + seconds
        for host in itertools.cycle(hosts):
            try:
                with socket.create_connection((host, self.port), min(seconds, _ANSWERS)) as probe:
                    self._address = probe.getsockname()[0]
                break
            except OSError as error:
                if (isinstance(error, socket.gaierror) and len(hosts) == 1) or time.monotonic() > until:
                    raise self._unreachable(error.strerror or error, host) from error
                time.sleep(10 * _LOOK)
        try:
            store = dist.TCPStore(host, self.port, is_master=False, timeout=timedelta(seconds=self.patience))  # type: ignore[attr-defined]
            for _, connection in connections(store):
                # No call waits longer than the launcher that leads waits for this one.
                limit = struct.pack("ll", int(self.patience), 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            terms = json.loads(store.get("terms"))
            for name in self.terms:
                if terms.get(name) != self.terms[name]:
                    raise LauncherError(
                        f"{name} is {self.terms[name]} on {self.host}, and {terms.get(name)} on {host}\n"
                        "Start all launchers with the same command but for --host, and the same script."
                    )
            self._number = store.add("launchers", 1) - 1
        except RuntimeError as error:
            raise self._unreachable(error, host) from error
        self._store, self._leader = store, host

    def _unreachable(self, why: object, host: str = "") -> _SilentError:
        host = host or self._leader
        first = "the first host" if host == self.hosts[0] else host
        return _SilentError(
            f"the launcher of {first} does not answer at {host}:{self.port}: {why!s:.100}\n"
            "It does not run, its host is lost, or the network to it is cut. This host has no worker now. Start this "
            "launcher again to join the job. If the other one has ended, start all again: the job goes on from its "
            "last checkpoint."
        )

    def _is(self, state: str) -> bool:
        if state not in self._states and self._store.check([state]):
            self._states.add(state)
        return state in self._states

    def _is_done(self) -> bool:
        return self._is("done")

    def _is_over(self) -> bool:
        return self._is_done() or self._is("job is over")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        number = self._store.add("workers", 1) - 1
        variables = {
            "ZEROGRAPH_ELASTIC": f"{self._leader}:{self.port}",
            "ZEROGRAPH_WORKER": str(number),
            "ZEROGRAPH_PIPE": str(theirs.fileno()),
            "ZEROGRAPH_WAITS": str(0.0 if self._claims is None else _STARTED),
            "MASTER_ADDR": self._leader,
            # The store is no rank's.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if len(self.hosts) > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = _interface(self._address)
        with theirs:
            process = self._spawn(variables, theirs.fileno())
        self._workers[number] = _Worker(self.host, process, ours.detach(), time.monotonic())
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
        """Tell the launcher that leads which workers live, and read which generation it has formed.

        Raises:
            LauncherError: this host counts as lost.
        """
        self._store.set(f"launcher/{self._number}", json.dumps([self.host, time.monotonic(), leaves, self._codes]))
        if self._store.check([f"launcher lost/{self._number}"]):
            why = self._store.get(f"launcher lost/{self._number}").decode()
            raise LauncherError(f"this host counts as lost: {why}\nStart its launcher again to join the job.")
        if self._store.check(["generation"]):
            self._generation = _Generation(*json.loads(self._store.get("generation")))
        self._is("began")
        self._answered_at = time.monotonic()

    def _hear(self) -> None:
        """Read what the launchers of other hosts tell. The last launcher of a host counts."""
        now = time.monotonic()
        if self._claims is not None and now > self._answered_at + _SIGN:
            self._claims.sign()
            self._answered_at = now
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
        generation, workers, ranks, _ = self._generation
        if number in workers and self._leads:
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
        last, waiting = self._generation, {}
        for number in self._workers:
            if self._store.check([f"want/{number}"]):
                since, most = json.loads(self._store.get(f"want/{number}"))
                if since >= last.number or number not in last.workers:
                    waiting[number] = most
        return waiting

    def _form(self) -> None:
        """Form the next generation once all that are left of the last one wait, or tell it that it may grow."""
        generation, workers, ranks, _ = self._generation
        waiting = self._waiting()
        starting = [number for number in self._workers if number not in waiting]
        busy = [number for number in starting if number in workers or not workers]
        if busy:
            training = sum(number in workers[:ranks] for number in busy)
            if workers and training == ranks and self._ranks(training + len(waiting), waiting) > ranks:
                self._store.set(f"grow/{generation}", "")
            return
        now, hosts_lack = time.monotonic(), len(self._launchers) + 1 < len(self.hosts)
        here = {self.host, *(launcher.host for launcher in self._launchers.values())}
        majority = 2 * sum(host in here for host in self._generation.hosts) - len(self._generation.hosts)
        # Most that are lost may only be cut off: then they go on, and this host does not.
        few = majority < 0 and self._claims is not None
        self._few_since = (self._few_since or now) if few else 0.0
        if few and now < self._few_since + _FEW_WAIT * self.patience:
            return
        if (now < self._began and majority <= 0) or (not self._awaited <= here and now < self._began + self.patience):
            return
        # Those that hold snapshots first, in the order of their ranks.
        order = [number for number in workers if number in waiting]
        order += [number for number in sorted(waiting) if number not in workers]
        ranks = self._ranks(len(order), waiting)
        if ranks:
            self._generation = _Generation(generation + 1, order, ranks, [self._workers[one].host for one in order])
            self._awaited, self._few_since = set(), 0.0
            if self._claims is not None:
                self._claims.claim(self._generation)
            # All that live have left the earlier generations.
            for key in self._store.list_keys():
                if key.startswith(("generation ", "broken/", "grow/")) or key in {f"want/{number}" for number in order}:
                    self._store.delete_key(key)
            self._store.set("generation", json.dumps(self._generation))
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
