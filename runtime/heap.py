"""The C library's heap: what a step frees on the CPU stays the process's, for the next step to take again.

glibc gives large blocks back to the system as they are freed, and takes them again page by page, zeroed by the kernel:
each step of a GPT of 42 M parameters on two ranks so takes some 50,000 pages, for which the kernel needs 0.1 of 1.4 s.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Blocks of that size glibc takes from the heap anyway, once one was freed. Larger ones go back: a hole that a few small
# blocks have settled in would not take them again.
_LARGEST = 2**25
_NEVER = 2**31 - 1


@functools.cache
def keep_freed() -> bool:
    """Let the process keep blocks of up to 32 MiB that are freed, from now on; whether it does.

    Not where the environment says how the heap is to be run, or where another library runs it.
    """
    said = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if said or platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
