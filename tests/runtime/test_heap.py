"""The process keeps memory that a step frees on the CPU, unless the environment or the configuration says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver() < ("glibc", "2.33"), reason="it is glibc that gives memory back, and since 2.33 it tells"
)

# Of one of the eight blocks.
PAGES = 2**24 // os.sysconf("SC_PAGE_SIZE")

PROGRAM = """
import ctypes, resource, sys
import torch
import zerograph as zg

class Step(zg.ZeroGraph):
    def build(self, x):
        return sum([x * k for k in range(2, 10)]).sum()

class Heap(ctypes.Structure):
    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Heap, ctypes.c_void_p
x = torch.ones(2**22)
for option in sys.argv[1:]:
    step = Step()
    step.config.memory.keep_freed_memory = option == "keep"
    for _ in range(6 if option == "keep" else 1):
        step(x)
    # The fewest: where the holes among kept blocks are too small for one of them, the heap grows by it, now and then.
    faults = sys.maxsize
    for _ in range(8 if option == "keep" else 1):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(x)
        faults = min(faults, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # More blocks, larger than any that was freed, than the freed ones have room for: a heap left alone maps some apart.
    mappings = libc.mallinfo2().hblks
    for _ in range(16):
        libc.malloc(ctypes.c_size_t(30 * 2**20))
    print(faults, libc.mallinfo2().hblks - mappings)
"""


def run(*options: str, **environment: str) -> list[tuple[int, bool]]:
    """By option: fewest pages that a run of a graph with eight blocks of 16 MiB takes anew; if the heap is alone."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PROGRAM, *options]
    ran = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    found = [line.split() for line in ran.stdout.splitlines()]
    return [(int(faults), mapped != "0") for faults, mapped in found]


def test_what_is_freed_is_there_for_the_next_step_unless_the_configuration_says_otherwise() -> None:
    (_, alone), (faults, kept_alone) = run("give back", "keep")
    assert alone
    assert faults < PAGES / 2
    assert not kept_alone


@pytest.mark.long
def test_what_is_freed_goes_back_where_the_environment_says_so() -> None:
    ((faults, alone),) = run("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert faults >= 8 * PAGES
    assert alone
