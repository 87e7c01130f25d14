"""What a step frees on the CPU the process keeps, if neither the environment nor the configuration says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")

# Of 16 MiB: the least that a run takes anew, were all given back.
PAGES = 2**24 // os.sysconf("SC_PAGE_SIZE")

PROGRAM = """
import resource, sys
import torch
import zerograph as zg

class Step(zg.ZeroGraph):
    def build(self, x):
        return sum([x * k for k in range(2, 10)]).sum()

step = Step()
step.config.keep_freed_memory = sys.argv[1] == "keep"
x = torch.ones(2**22)
for _ in range(8):
    step(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 8)
"""


def faults(option: str, **environment: str) -> int:
    """Pages that each run of a graph takes anew that has eight blocks of 16 MiB at once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PROGRAM, option]
    ran = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_what_is_freed_is_there_for_the_next_step() -> None:
    assert faults("keep") < PAGES / 10


@pytest.mark.parametrize(
    ("option", "environment"), [("give back", {}), ("keep", {"MALLOC_TRIM_THRESHOLD_": "131072"})], ids=str
)
def test_it_goes_back_where_somebody_says_so(option: str, environment: dict[str, str]) -> None:
    assert faults(option, **environment) >= PAGES
