"""Elastic jobs whose workers are forked, not started: the launcher's part runs in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import multiprocessing as mp
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, TensorDataset

import zerograph as zg
from benchmarks.measure.hosts import Host
from tests.faults.test_soak import usage
from zerograph.cli.elastic import LauncherError, Supervisor
from zerograph.compiler.compiler import Compiler
from zerograph.loops import elastic as loop
from zerograph.loops.elastic import _Loop as elastic_loop
from zerograph.runtime.executor import Executor
from zerograph.runtime.job import elastic as generations
from zerograph.runtime.job.channel import Channel
from zerograph.runtime.job.process_group import written_by_others
from zerograph.runtime.wire import direct

EPOCHS, SAMPLES, BATCH = 2, 48, 8
STEPS = EPOCHS * SAMPLES // BATCH
# Seconds until a job that has not ended hangs, on a busy machine.
PATIENCE = 240.0

# What a rank is about to do when it is killed, a little later.
PLACES: Mapping[str, tuple[Any, str]] = {
    "compilation": (Compiler, "compile"),
    "step": (Executor, "__call__"),
    "collective": (direct, "host_group"),
    "comparison": (Channel, "compare"),
    "snapshot": (loop._Loop, "_snapshot"),
    "save": (zg.ZeroGraph, "save"),
    "exchange": (loop._Loop, "_exchange"),
    "recovery": (loop._Loop, "_enter"),
    "joining": (loop._Loop, "_enter"),
}


def before(place: str, act: Callable[[], None]) -> None:
    """Call a function each time that this process comes to the place."""
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def send(number: int, delay: float, *processes: int) -> None:
    """Send a signal to processes, a little later."""
    if delay:
        threading.Timer(delay, send, (number, 0.0, *processes)).start()
        return
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@dataclass(frozen=True)
class Fault:
    """A signal for one worker.

    Attributes:
        worker: its number; a number from 4 up is one that takes a lost one's place.
        place: what it is about to do, of ``PLACES``; or "connecting": the others have its address, and wait.
        occurrence: for which time, from 1.
        delay: seconds after that.
    """

    worker: int
    place: str
    occurrence: int = 1
    delay: float = 0.0
    signal: int = signal.SIGKILL

    def arrange(self, folder: Path) -> None:
        """Send the signal to this process when it comes to the place."""
        calls = [0]

        def act() -> None:
            calls[0] += 1
            if calls[0] == self.occurrence:
                (folder / f"fault of {self.worker} {self.place}").write_text(json.dumps([time.monotonic(), self.place]))
                send(self.signal, self.delay, os.getpid())

        if self.place == "connecting":
            last = self.occurrence

            class Connecting(dist.ProcessGroupGloo):
                def __init__(self, store: Any, rank: int, size: int, **options: Any) -> None:
                    if calls[0] == last - 1:
                        publish_address(store, rank, size, folder / "busy")
                    act()
                    super().__init__(store, rank, size, **options)

            distributed_c10d.ProcessGroupGloo = Connecting  # type: ignore[misc]
        else:
            before(self.place, act)


def publish_address(store: Any, rank: int, size: int, busy: Path) -> None:
    """Tell the other ranks of a group an address from which they wait for a connection: the greater one connects.

    If there is the file, it has a smaller address of this host, to which they connect.
    """
    options, meeting, key = dist.ProcessGroupGloo._Options(), dist.HashStore(), f"0/{rank}"
    host = os.environ["MASTER_ADDR"].replace("0.1", "0.2")
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    threading.Thread(target=dist.ProcessGroupGloo, args=(meeting, rank, size, options), daemon=True).start()
    addresses = meeting.get(key)
    if busy.exists():
        # A port, as the system has it, and an address.
        before = addresses.index(socket.inet_aton(host)) - 2
        addresses = addresses.replace(addresses[before : before + 6], busy.read_bytes())
    store.set(key, addresses)


@contextlib.contextmanager
def busy_address() -> Iterator[bytes]:
    """Listen at an address of the loopback interface that answers no further connection; yield its bytes for gloo."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        # Gloo compares ports with their bytes swapped: these are less than all that are drawn.
        for port in range(0x3000, 0x7000, 0x100):
            with contextlib.suppress(OSError):
                listening.bind(("127.0.0.1", port))
                break
        listening.listen(0)
        stack.enter_context(socket.create_connection(listening.getsockname()))
        yield port.to_bytes(2, "big") + socket.inet_aton("127.0.0.1")


@dataclass(frozen=True)
class Kill:
    """One of many kills of a job, each counted from the one before.

    Attributes:
        place, occurrence, delay: as of a :class:`Fault`. A process that is joining has had no rank yet.
        rank: the rank that is killed.
        how: "alone"; "two" ranks at once; "stopped".
    """

    place: str
    rank: int
    occurrence: int
    delay: float
    how: str

    @staticmethod
    def drawn(seed: int, number: int) -> Kill:
        draw = random.Random(f"{seed} {number}")
        # The first must come without another.
        place = draw.choice(list(PLACES) if number else ["step", "collective", "comparison", "snapshot", "save"])
        most = {"compilation": 2, "step": 6, "collective": 30, "comparison": 15, "snapshot": 2}.get(place, 1)
        delay = draw.choice([0.0, draw.uniform(0, 0.002), draw.uniform(0, 0.05), draw.uniform(0, 0.5)])
        how = draw.choice(["alone"] * 12 + ["two"] * 3 + ["stopped"])
        return Kill(place, draw.randrange(4), draw.randint(1, most), delay, how)

    def victims(self, worker: generations.Worker, spared: int) -> tuple[int, ...]:
        """Return the workers to kill; none if this one is not the first of them."""
        workers = worker.generation.workers
        if not workers or self.place == "joining":
            return () if workers or self.place != "joining" else (worker.number,)
        ring = [workers[(self.rank + at) % len(workers)] for at in range(len(workers))]
        chosen = [number for number in ring if number != spared][: 1 + (self.how == "two")]
        return tuple(chosen) if chosen[:1] == [worker.number] else ()


def arrange_kills(folder: Path, options: Options) -> None:
    """Let this process die where one of the drawn kills of the job says so."""
    worker, calls, done = generations.worker(), Counter[str](), [0]
    assert worker is not None
    (folder / f"process of {worker.number}").write_text(str(os.getpid()))

    def act(place: str) -> None:
        while (folder / f"fault {done[0]}").exists():
            done[0] += 1
            calls.clear()
        kill = Kill.drawn(options.seed, done[0])
        if calls["later"] >= 6:
            # The recovery from the kill before was over too early.
            kill = replace(kill, place="step", occurrence=1)
        calls["later"] += place == "step"
        # Before the first checkpoint two kills may be the end.
        saved = done[0] or any(folder.glob("checkpoints/step-*/index.json"))
        if done[0] >= options.kills or place != kill.place or not saved or worker._over.is_set():
            return
        victims = kill.victims(worker, options.spared)
        calls[place] += bool(victims)
        if not victims or calls[place] < kill.occurrence:
            return
        with contextlib.suppress(FileExistsError):
            with open(folder / f"fault {done[0]}", "x") as file:
                json.dump([time.monotonic() + kill.delay, f"{place}, stopped" * (kill.how == "stopped") or place], file)
            number = signal.SIGSTOP if kill.how == "stopped" else signal.SIGKILL
            files = [folder / f"process of {victim}" for victim in reversed(victims)]
            send(number, kill.delay, *(int(one.read_text()) for one in files))

    for place in PLACES:
        before(place, functools.partial(act, place))


@dataclass(frozen=True)
class Options:
    """Options of a job's script."""

    virtual: int | None = 4
    stage: int = 2
    loop: bool = False
    every: int | None = 3
    checkpoints: bool = False
    save_every: int | None = None
    # Seconds that a step takes at least, and until a process that takes a lost one's place begins: after the first
    # step of the generation that has gone on without it.
    pace: float = 0.0
    late: float | None = None
    # How often the data are read; drawn kills, what they are drawn from, and a worker that they spare.
    epochs: int = EPOCHS
    kills: int = 0
    seed: int = 0
    spared: int = -1
    # Variables of the processes' environment.
    variables: Mapping[str, str] = field(default_factory=dict)

    def decay(self) -> float:
        """Return the factor of the learning rate after five steps: small steps at the end, but not too small."""
        return 0.7 ** (EPOCHS / self.epochs)


class Step(zg.ZeroGraph):
    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(32, 16), nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 32)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, options.decay()))
        self.config.set(stage=options.stage)
        self.config.virtual_ranks = options.virtual

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        return loss


def script(folder: Path, options: Options) -> None:
    """Train, as a user's script does; write a line for each call, and the fingerprint at the end."""
    graph = Step(options)
    (optimizer,), (scheduler,) = graph._optimizers, graph._schedulers
    step: Any = graph
    if options.loop:
        # A new one: a graph has the optimizer's methods.
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(graph.model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, options.decay())
        step, optimizer, scheduler = zg.prepare(graph.model, optimizer, scheduler, config=graph.config)
    tokens = torch.randint(32, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES), tokens), batch_size=BATCH, shuffle=True)
    worker = generations.worker()
    measured = [0]
    leave = elastic_loop._leave

    def leaving(self: Any, why: str) -> None:
        (folder / f"left {os.getpid()} {time.monotonic()}").touch()
        leave(self, why)

    elastic_loop._leave = leaving  # type: ignore[method-assign]

    def loop(x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(step(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(step.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    def train_step(number: int, batch: list[torch.Tensor]) -> None:
        rows, x = batch
        loss = loop(x) if options.loop else step(x)
        # Of a loop every rank reads all rows, together.
        read = rows.tolist()
        own = [] if options.loop and zg.rank() else read
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        generation = restarts if worker is None else worker.generation.number
        line = [number, generation, zg.rank(), zg.world_size(), loss.item().hex(), own, time.monotonic()]
        with open(folder / f"{platform.node()}-{os.getpid()}.jsonl", "a") as file:
            print(json.dumps(line), file=file)
        if options.kills and measured[0] != generation:
            measured[0] = generation
            write_usage(folder / f"usage of {worker.number}", zg.world_size(), len(written_by_others), generation)
            with open(folder / f"files of {worker.number}", "a") as file:
                print(generation, *sorted(open_files().items()), file=file)
        time.sleep(options.pace * (not options.kills or not (folder / f"fault {options.kills - 1}").exists()))
        while (folder / "hold").exists():
            time.sleep(0.02)

    where = folder / "checkpoints" if options.checkpoints else None
    zg.elastic(
        train_step,
        step,
        loader,
        epochs=options.epochs,
        snapshot_every=options.every,
        checkpoints=where,
        save_every=options.save_every,
    )
    end = zg.step_of(optimizer) if options.loop else graph
    (folder / f"end {platform.node()} {os.getpid()}").write_text(
        json.dumps([zg.world_size(), end.steps_done, end.fingerprint()])
    )


def open_files() -> Counter[str]:
    """Return how many files of each name, or kind, this process has open."""
    names = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names[os.readlink(f"/proc/self/fd/{number}").split(":[")[0]] += 1
    return names


def write_usage(file: Path, *values: float) -> None:
    """Write a line: what this process uses, and these values."""
    with open(file, "a") as lines:
        print(json.dumps([*astuple(usage()), *values]), file=lines)


class _Forked:
    """A forked process, as far as the launcher looks at one."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)  # type: ignore[assignment]
        return self._code

    def wait(self, _: float = 0.0) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        if self._code is None:
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forking(Supervisor):
    """A launcher whose workers are forked before it has a store: a thread of that may hold a lock during a fork."""

    def fork(self, count: int, function: Callable[[int], None]) -> None:
        """Fork workers, which wait until they are started and then call the function with their number."""
        self.idle: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if not pid:
                _work(theirs, function)
            theirs.close()
            self.idle.append((pid, ours))

    def _form(self) -> None:
        before = self._generation
        super()._form()
        if self._generation != before and hasattr(self, "usage"):
            # A socket for each that has not started, and a pipe of each that has.
            own = -len(self.idle) - len(self._workers)
            write_usage(self.usage, own, self._store.num_keys(), self._generation[0])

    def _spawn(self, variables: Mapping[str, str], pipe: int) -> subprocess.Popen[bytes]:
        pid, ours = self.idle.pop(0)
        socket.send_fds(ours, [json.dumps(dict(variables)).encode()], [pipe])
        ours.close()
        return _Forked(pid)  # type: ignore[return-value]


def _work(start: socket.socket, function: Callable[[int], None]) -> None:
    """Wait for the environment of a worker, and be one."""
    start.settimeout(10 * PATIENCE)
    # For the report of a job that hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        # As in ``forked_pairs``: a backward's threads must not be the first to make torch's pool of threads anew.
        torch.set_num_threads(1)
        content, pipes, _, _ = socket.recv_fds(start, 4096, 1)
        variables = {**json.loads(content), "ZEROGRAPH_PIPE": str(pipes[0])}
        os.set_blocking(pipes[0], False)
        os.environ |= variables
        function(int(variables["ZEROGRAPH_WORKER"]))
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    # As Python's end would: the threads that use a store end first.
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(code)


def supervise(
    folder: Path,
    faults: Sequence[Fault],
    options: Options,
    least: int,
    most: int,
    restarts: int,
    patience: float,
    **place: Any,
) -> int:
    """Run a launcher, of one host, or of the host that ``place`` names; return its exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)

    def work(number: int) -> None:
        for fault in faults:
            if fault.worker == number:
                fault.arrange(folder)
        if number >= most and options.late is not None:
            while not any(json.loads(line)[1] > 1 for file in folder.glob("*.jsonl") for line in _lines(file)):
                time.sleep(0.02)
            time.sleep(options.late)
        os.environ |= options.variables
        if options.kills:
            arrange_kills(folder, options)
        script(folder, options)

    each = most // len(place.get("hosts", [""]))
    supervisor = _Forking([], least, most, restarts, patience, each, **place)
    supervisor.fork(each + restarts, work)
    if options.kills:
        supervisor.usage = folder / "usage of the launcher"
    if place:
        # The first launcher waits for the other for some seconds only.
        (folder / f"ready {supervisor.host}").touch()
        while len([*folder.glob("ready *")]) < len(supervisor.hosts):
            time.sleep(0.02)
    try:
        code = supervisor.run()
    except LauncherError as error:
        print(f"zerograph: {error}", file=sys.stderr)
        code = 1
    for pid, _ in supervisor.idle:
        os.kill(pid, signal.SIGKILL)
    (folder / "code").write_text(str(code))
    return code


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        code: the launcher's exit code; None: it hung.
        lines: of each call: step, generation, rank, ranks, loss, rows, time.
        ends: of each rank that came to the end: number of ranks, updates, fingerprint.
        output: what was printed.
        faults: when, and where, each fault came to pass.
        left: when a rank has left a generation.
    """

    code: int | None
    lines: list[list[Any]]
    ends: list[list[Any]]
    output: str
    faults: list[tuple[float, str]]
    left: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Return the seconds from the last fault to the next step that was done on another generation."""
        return self.seconds_after(max(self.faults)[0]) if self.faults else None

    def seconds_after(self, moment: float) -> float | None:
        """Return the seconds until the next step that was done in a later generation."""
        before = max((line[1] for line in self.lines if line[6] < moment), default=0)
        return min((line[6] - moment for line in self.lines if line[1] > before and line[6] > moment), default=None)

    @property
    def seconds_until_left(self) -> float:
        """Return the seconds from the last fault until the last rank has left its generation. Nothing is compiled."""
        return max(self.left) - max(self.faults)[0]

    def repeated(self) -> int:
        """Return the most steps that were computed again in one go."""
        most, done = 0, 0
        for generation in sorted({line[1] for line in self.lines}):
            numbers = [line[0] for line in self.lines if line[1] == generation]
            most, done = max(most, done - min(numbers) + 1), max(numbers)
        return most

    def sizes(self) -> list[int]:
        """Return the numbers of ranks of the generations, in order."""
        return list({line[1]: line[3] for line in sorted(self.lines)}.values())

    def losses(self) -> dict[int, set[str]]:
        """Return the losses of each step: one, if all tries on all ranks have the same bits."""
        losses: dict[int, set[str]] = {}
        for number, _, _, _, loss, *_ in self.lines:
            losses.setdefault(number, set()).add(loss)
        return losses

    def rows(self) -> dict[int, list[int]]:
        """Return the samples of each step in its last try, in the order of the ranks."""
        last: dict[int, int] = {}
        for number, generation, *_ in self.lines:
            last[number] = max(last.get(number, 0), generation)
        rows: dict[int, list[int]] = {}
        for number, _, _, _, _, own, _ in sorted(
            (line for line in self.lines if line[1] == last[line[0]]), key=lambda line: line[:3]
        ):
            rows.setdefault(number, []).extend(own)
        return rows


def run(
    folder: Path,
    faults: list[Fault],
    options: Options,
    *,
    least: int = 1,
    most: int = 4,
    restarts: int = 0,
    patience: float = 60.0,
) -> Outcome:
    """Run an elastic job with these faults."""
    limit = PATIENCE + 15.0 * options.kills
    job = mp.get_context("forkserver").Process(
        target=supervise, args=(folder, faults, options, least, most, restarts, patience)
    )
    job.start()
    job.join(limit)
    hung = job.is_alive()
    if hung:
        for file in folder.glob("process of *"):
            send(signal.SIGUSR1, 0.0, int(file.read_text()))
        time.sleep(1.0)
        job.kill()
        job.join()
    code = folder / "code"
    return read(folder, int(code.read_text()) if code.exists() and not hung else None)


class Launchers:
    """Launchers of a job of hosts with two ranks each; a context, at whose end none runs."""

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        options: Options,
        *faults: Fault,
        names: Sequence[str] = (),
        shared: Path | None = None,
    ) -> None:
        self.hosts, self.folder = hosts, folder
        self.names = names or [host.address for host in hosts]
        self.arguments: dict[str, Any] = {"folder": folder, "faults": faults, "options": options, "hosts": self.names}
        self.arguments |= {"least": 1, "most": 2 * len(hosts), "restarts": 0, "patience": 5.0}
        self.arguments |= {"port": 29500, "shared": shared}
        self.processes: dict[Host, mp.process.BaseProcess] = {}

    def __enter__(self) -> Launchers:
        for host in self.hosts:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def start(self, host: Host) -> None:
        arguments = self.arguments | {"host": self.names[self.hosts.index(host)]}
        self.processes[host] = mp.get_context("forkserver").Process(target=_supervise_on, args=(host, arguments))
        self.processes[host].start()

    def kill(self, host: Host, number: int = signal.SIGKILL) -> None:
        """Send a signal to a launcher, and to no worker."""
        # What has entered the host's namespaces waits for its only child.
        entered = self.processes[host].pid
        (launcher,) = Path(f"/proc/{entered}/task/{entered}/children").read_text().split()
        os.kill(int(launcher), number)
        if number == signal.SIGKILL:
            self.processes[host].join()

    def start_again(self, host: Host) -> None:
        """Start a host's launcher again; the ranks hold until it has come."""
        come = f"host {self.names[self.hosts.index(host)]} has come, with 2"
        before = read(self.folder, 0).output.count(come)
        (self.folder / "hold").touch()
        self.start(host)
        self.wait_for(lambda job: job.output.count(come) > before)
        (self.folder / "hold").unlink()

    def wait_for(self, is_so: Callable[[Outcome], bool]) -> None:
        """Wait until the job has come so far."""
        limit = time.monotonic() + PATIENCE
        while not is_so(read(self.folder, 0)):
            assert time.monotonic() < limit, read(self.folder, 0).output
            time.sleep(0.1)

    def wait(self) -> tuple[Outcome, list[int]]:
        """Wait for the end of all launchers; return the outcome, and the exit codes. No process is left."""
        for host in self.hosts:
            self.processes[host].join(PATIENCE)
        codes = [code for host in self.hosts if (code := self.processes[host].exitcode) is not None]
        if len(codes) < len(self.hosts):
            for host in self.hosts:
                host.signal(signal.SIGUSR1)
            time.sleep(1.0)
            raise AssertionError(f"it hangs\n{read(self.folder, 0).output}")
        limit = time.monotonic() + 5.0
        while any(runs(process) for host in self.hosts for process in host.processes()):
            assert time.monotonic() < limit, "processes are left"
            time.sleep(0.05)
        return read(self.folder, codes[0]), codes


def _supervise_on(host: Host, arguments: Mapping[str, Any]) -> None:
    """Run a launcher in the namespaces of a host, forked off what has imported everything, and end as it does."""
    where, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    for place in [os.open(f"/proc/{host.first}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "pid", "mnt")]:
        if libc.setns(place, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(place)
    os.chdir(where)
    # Only children are in another namespace of processes.
    launcher = os.fork()
    if not launcher:
        try:
            os._exit(supervise(**arguments))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])))


def runs(process: int) -> bool:
    """Return whether a process is more than what its parent has not waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read(folder: Path, code: int | None) -> Outcome:
    """Return the outcome of a job from what its ranks have written."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in _lines(file)]
    faults = sorted(tuple(json.loads(file.read_text())) for file in folder.glob("fault*"))
    ends = [json.loads(file.read_text()) for file in folder.glob("end *")]
    text = (folder / "output").read_text() if (folder / "output").exists() else ""
    left = [float(file.name.split()[2]) for file in folder.glob("left *")]
    return Outcome(code, lines, ends, text, faults, left)


def _lines(file: Path) -> list[str]:
    """Return the complete lines of a file."""
    return file.read_text().split("\n")[:-1]


def undisturbed(folder: Path, options: Options) -> Outcome:
    """Run the script in one process."""
    return run(folder, [], options, least=1, most=1)
