"""Hosts on one machine: each has processes, a host name and a network of its own; a bridge joins them.

The namespaces have no names. They last as long as their first process, which ends when its standard input does: nothing
remains, however the process that made them ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LINK = "eth0"
_PROGRAMS = ("ip", "nsenter", "tc", "unshare")
_UNSHARE = ("unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "cat")
# Bytes that leave at once, and the time that a packet may wait for its turn before it is dropped.
_BURST, _QUEUE = "1mb", "200ms"


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: its host name.
        address: of its interface.
        first: the first process of its namespaces, as this process sees it.
    """

    name: str
    address: str
    first: int

    def enter(self, folder: Path | None = None) -> list[str]:
        """Return the beginning of a command that runs on the host, in a folder; None: in the current one."""
        namespaces = ("--net", "--uts", "--pid", "--mount")
        return ["nsenter", "--target", str(self.first), *namespaces, f"--wd={folder or Path.cwd()}", "--"]

    def run(self, *command: str) -> None:
        """Run a command on the host.

        Raises:
            RuntimeError: it fails.
        """
        _run(*self.enter(), *command)

    def shape(self, rate: str | None) -> None:
        """Limit what the host sends to a rate as ``tc`` writes it, ``"1gbit"``; None: no limit."""
        if rate is None:
            with contextlib.suppress(RuntimeError):
                self.run("tc", "qdisc", "del", "dev", LINK, "root")
            return
        limit = ("rate", rate, "burst", _BURST, "latency", _QUEUE)
        self.run("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *limit)

    def cut(self) -> None:
        """Cut the wire: from now on no packet arrives on either side."""
        self.run("ip", "link", "set", LINK, "down")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the host but the first."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def processes(self) -> list[int]:
        """Return the processes of the host without the first, as this process sees them."""
        own = os.readlink(f"/proc/{self.first}/ns/pid")
        members = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == own:
                    members.append(int(entry.name))
        return [process for process in members if process != self.first]


def two_hosts(
    rate: str | None = None, addresses: str = "10.77.0.{}"
) -> contextlib.AbstractContextManager[tuple[Host, ...]]:
    """Make two hosts, as :func:`make_hosts`."""
    return make_hosts(2, rate, addresses)


@contextlib.contextmanager
def make_hosts(count: int, rate: str | None = None, addresses: str = "10.77.0.{}") -> Iterator[tuple[Host, ...]]:
    """Make hosts, and end all their processes at the end.

    Args:
        count: how many.
        rate: what each of them can send, as ``tc`` writes it; None: no limit.
        addresses: of the hosts, with a host's number in place of ``{}``; of IPv4 or IPv6.

    Raises:
        RuntimeError: this process may not make namespaces, or the machine cannot shape an interface.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    with contextlib.ExitStack() as stack:
        switch, *firsts = [_first_process(stack) for _ in range(count + 1)]
        # Processes have these numbers only outside of their own namespaces.
        outside = ("nsenter", "--target", str(switch), "--net", "--", "ip", "link")
        _run(*outside, "add", "bridge", "type", "bridge")
        _run(*outside, "set", "bridge", "up")
        hosts = tuple(Host(f"host{at}", addresses.format(at + 1), first) for at, first in enumerate(firsts))
        for host in hosts:
            _run(*outside, "add", host.name, "type", "veth", "peer", "name", LINK, "netns", str(host.first))
            _run(*outside, "set", host.name, "master", "bridge", "up")
            host.run("hostname", host.name)
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", LINK, "nodad")
            host.run("ip", "link", "set", LINK, "up")
            if rate is not None:
                host.shape(rate)
        yield hosts


def unavailable() -> str:
    """Return why this process cannot make hosts; empty if it can."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} is not installed (iproute2 and util-linux of Linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    tried = subprocess.run([*_UNSHARE], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


def _first_process(stack: contextlib.ExitStack) -> int:
    """Start the first process of new namespaces and return its number here."""
    holder = subprocess.Popen(_UNSHARE, stdin=subprocess.PIPE)

    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")

    def end() -> None:
        # The kernel ends all processes of a namespace with its first, and only then does unshare end.
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait()

    stack.callback(end)
    limit = time.monotonic() + 10.0
    while time.monotonic() < limit:
        for child in children.read_text().split():
            # Before it becomes this program it may not have mounted its own /proc.
            if Path(f"/proc/{child}/comm").read_text().strip() == _UNSHARE[-1]:
                return int(child)
        time.sleep(0.005)
    raise RuntimeError("unshare started no process in ten seconds")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")


def environment(hosts: Sequence[Host], rank: int, ranks: int) -> dict[str, str]:
    """Return a launcher's variables for a rank; the ranks are spread evenly over the hosts, in order."""
    each = ranks // len(hosts)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",
        # gloo asks the host's name for its address, and these names have none.
        "GLOO_SOCKET_IFNAME": LINK,
    }


def host_of(hosts: Sequence[Host], rank: int, ranks: int) -> Host:
    """Return the host of a rank."""
    return hosts[rank // (ranks // len(hosts))]
