"""``zerograph launch``: print and run the command that starts a script on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from zerograph.cli.elastic import Supervisor

_PORT, _PATIENCE = 29500, 30.0


def launch(
    script: Annotated[Path, typer.Argument(help="the script to start; options of launch go before it")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="ranks on each host; default: its GPUs, else 1")] = None,
    hosts: Annotated[str | None, typer.Option(help="names of all hosts, with commas; reached by ssh")] = None,
    host: Annotated[str | None, typer.Option(help="run the part of this one of --hosts here, no other")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="use srun; default inside of an allocation")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes of Slurm; default: those of the allocation")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the rendezvous of --hosts")] = _PORT,
    max_restarts: Annotated[int, typer.Option(min=0, help="how often failed ranks are started again")] = 0,
    elastic: Annotated[
        str | None, typer.Option(help="MIN:MAX ranks for zg.elastic(): it goes on without lost ones")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="seconds of silence until an elastic rank or host is lost")
    ] = _PATIENCE,
    shared: Annotated[
        Path | None, typer.Option(help="a folder of all hosts: an elastic job goes on without the first one")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the commands only")] = False,
) -> None:
    """Print and run the command that starts a script on all ranks: torchrun here, on several hosts, or srun.

    Example: zerograph launch --ranks 2 train.py --epochs 3

    The exit code is that of the first command that fails; 2 for wrong usage.
    """
    if not script.exists():
        raise typer.BadParameter(f"there is no script {script}")
    arguments = arguments or []
    is_marked = arguments[:1] == ["--"]
    arguments = arguments[is_marked:]
    if "--dry-run" in arguments and not is_marked:
        raise typer.BadParameter(
            "--dry-run after the script is an argument of the script, and starts it: put options of launch before the "
            "script, or those of the script after --"
        )
    own = {"--ranks", "--hosts", "--host", "--slurm", "--nodes", "--port", "--max-restarts", "--elastic", "--shared"}
    own &= {*arguments}
    if own and not is_marked:
        typer.echo(f"zerograph: {', '.join(sorted(own))} after the script: an argument of the script", err=True)
    slurm = slurm or (hosts is None and "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ)
    if (slurm and hosts is not None) or (host is not None and hosts is None) or (nodes is not None and not slurm):
        raise typer.BadParameter("give --hosts (and --host), or --slurm (and --nodes), not both")
    started, names = [str(script), *arguments], [] if hosts is None else [name.strip("[]") for name in hosts.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise typer.BadParameter(f"--hosts {hosts}: give each host once, with commas between them")
    host = host and host.strip("[]")
    if host is not None and host not in names:
        raise typer.BadParameter(f"--host {host} is not one of --hosts {hosts}")
    if elastic is not None:
        if hosts is None and "TORCHELASTIC_RUN_ID" in os.environ:
            names, host, port = _under_torchrun(port)
        elif slurm or (ranks is not None and hosts is None) or (hosts is not None and host is None):
            raise typer.BadParameter(
                "--elastic is for one host without --ranks and --slurm, or for the part of one of several: give "
                "--hosts and --host, and start such a launcher on each of them"
            )
        if shared is not None and not (names and shared.is_dir()):
            raise typer.BadParameter(f"--shared {shared}: give a folder that all of --hosts have")
        place = {} if host is None else {"hosts": names, "host": host, "port": port, "shared": shared}
        supervisor = _supervisor(elastic, started, restarts=max_restarts, patience=patience, each=ranks, **place)
        typer.echo(f"{supervisor.each} x {shlex.join(supervisor.command)}", err=True)
        raise typer.Exit(0 if dry_run else _supervise(supervisor))
    if shared is not None or patience != _PATIENCE:
        raise typer.BadParameter("--shared and --patience are of an elastic job: give --elastic MIN:MAX too")
    each = ranks or _gpus()
    if slurm:
        if max_restarts:
            raise typer.BadParameter("--max-restarts is torchrun's: with Slurm use sbatch --requeue")
        size = [] if nodes is None else ["--nodes", str(nodes)]
        ends = ("--kill-on-bad-exit=1", "--quit-on-interrupt")
        commands = [["srun", *size, "--ntasks-per-node", str(each), *ends, sys.executable, *started]]
    elif hosts is None:
        commands = [_torchrun("--standalone", "--nproc-per-node", str(each), *_restarts(max_restarts), *started)]
    else:
        commands = _on_hosts(names, host, each, port, max_restarts, started)
    for command in commands:
        typer.echo(shlex.join(command), err=True)
    if dry_run:
        return
    for program, instead in (
        ("srun", "start on a node of the cluster"),
        ("ssh", "start each host's part there, by --host"),
    ):
        if any(command[0] == program for command in commands) and shutil.which(program) is None:
            raise typer.BadParameter(f"there is no {program} on PATH: install it, or {instead}")
    raise typer.Exit(_run(commands))


def _under_torchrun(port: int) -> tuple[list[str], str, int]:
    """Return the hosts on which torchrun has started launchers, this one, and a port for their store.

    The environment is that of a script without torchrun then.
    """
    import torch.distributed as dist

    own = os.environ
    number, count = int(own["GROUP_RANK"]), int(own["GROUP_WORLD_SIZE"])
    if own["LOCAL_WORLD_SIZE"] != "1":
        raise typer.BadParameter("torchrun starts one launcher of an elastic job on each host: --nproc-per-node 1")
    first, meeting = own["MASTER_ADDR"], int(own["MASTER_PORT"])
    # Torchrun's own: it starts the launchers again with other numbers.
    store = dist.TCPStore(first, meeting, is_master=False)  # type: ignore[attr-defined]
    key = f"zerograph launcher {own['TORCHELASTIC_RESTART_COUNT']} of {count} "
    with socket.create_connection((first, meeting)) as probe:
        store.set(f"{key}{number}", first if number == 0 else probe.getsockname()[0])
    names = [store.get(f"{key}{one}").decode() for one in range(count)]
    prefixes = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
    for name in [one for one in own if one.startswith(prefixes) or one in ("RANK", "WORLD_SIZE")]:
        del own[name]
    # The usual port may be torchrun's.
    return names, names[number], meeting + 1 if port == _PORT else port


def _supervisor(ranks: str, started: Sequence[str], each: int | None, **options: Any) -> Supervisor:
    """Return the launcher of this host's part of an elastic job on MIN:MAX ranks."""
    if platform.system() != "Linux":
        raise typer.BadParameter("--elastic needs Linux, whose /proc tells what a lost rank has left")
    from zerograph.cli.elastic import Supervisor

    least, _, most = ranks.partition(":")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise typer.BadParameter(f"--elastic {ranks}: give the least and the most ranks, such as 2:4")
    hosts = options.get("hosts", ["this host"])
    digest = hashlib.blake2b(Path(started[0]).read_bytes(), digest_size=4).hexdigest()
    terms = {"--elastic": ranks, "--hosts": ",".join(hosts), "--shared": str(options.get("shared"))}
    terms |= {"the script": shlex.join(started), "its digest": digest}
    each = each or math.ceil(int(most) / len(hosts))
    return Supervisor([sys.executable, *started], int(least), int(most), each=each, terms=terms, **options)


def _supervise(supervisor: Supervisor) -> int:
    """Run this host's part of an elastic job, and return its exit code."""
    from zerograph.cli.elastic import LauncherError

    try:
        with _exit_by_signals():
            return supervisor.run()
    except LauncherError as error:
        typer.echo(f"zerograph: {error}", err=True)
        return 1


def _gpus() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def _torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def _restarts(number: int) -> list[str]:
    return ["--max-restarts", str(number)] if number else []


def _on_hosts(
    hosts: Sequence[str], host: str | None, ranks: int, port: int, max_restarts: int, started: Sequence[str]
) -> list[list[str]]:
    """Return a command for each host; one only if ``host`` names it."""
    commands = []
    for number, name in enumerate(hosts):
        place = ("--nnodes", str(len(hosts)), "--node-rank", str(number))
        meeting = ("--master-addr", hosts[0], "--master-port", str(port))
        command = _torchrun(*place, *meeting, "--nproc-per-node", str(ranks), *_restarts(max_restarts), *started)
        if host == name:
            return [command]
        # By ssh in the same folder; the environment is that of a new login there.
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
        is_here = name in ("localhost", "127.0.0.1", socket.gethostname())
        commands.append(command if is_here else ["ssh", "-tt", name, remote])
    return commands


@contextlib.contextmanager
def _exit_by_signals() -> Iterator[None]:
    """Leave the block by an exit on SIGTERM, and on SIGHUP of a terminal that closes, which ``nohup`` ignores."""
    # Windows has no SIGHUP.
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _exit) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@_exit_by_signals()
def _run(commands: Sequence[Sequence[str]]) -> int:
    """Run the commands together and return the first exit code that is not 0; one that fails ends the others.

    Signals of which only this process is told end them too. Ctrl-C reaches them as well, so they end by themselves, and
    may save before: only a second one terminates them.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        running += map(subprocess.Popen, commands)
        while True:
            codes = [process.poll() for process in running]
            if failed := next((code for code in codes if code), None):
                # A shell's code for a signal.
                return failed if failed > 0 else 128 - failed
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.1)
    except KeyboardInterrupt:
        if _is_in_foreground():
            for process in running:
                process.wait()
        raise
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
        for process in running:
            process.wait()


def _is_in_foreground() -> bool:
    """Return whether the terminal sends its signals to this process and the commands."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)
