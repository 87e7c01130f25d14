"""Counters of the kernel about this process (Linux)."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Bytes of memory that the process has now."""
    return _status("VmRSS")


def most_resident() -> int:
    """The most bytes that it had since :func:`forget_most_resident`."""
    return _status("VmHWM")


def forget_most_resident() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def written() -> int:
    """Bytes that it has written since its start, to files and sockets. Steps write to gloo's sockets only."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def on_the_wire() -> int:
    """Bytes that this host has sent over all its interfaces but the loopback, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    sent = {name.strip(): int(counters.split()[8]) for name, _, counters in (line.partition(":") for line in lines)}
    return sum(count for name, count in sent.items() if name != "lo")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
