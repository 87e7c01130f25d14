"""The C library's heap: what a step frees on the CPU stays the process's, for the next step to take again.

glibc gives large blocks back to the system as they are freed, and takes them again page by page, zeroed by the kernel:
each step of a GPT of 42 M parameters on two ranks so takes 50,000 pages, a tenth of a second of its 1.45.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Older versions of glibc refuse a threshold of blocks of their own beyond the second.
_THRESHOLDS = 2**30, 2**25
_NEVER = 2**31 - 1


@functools.cache
def keep_freed() -> bool:
    """Let the process keep what is freed, from now on; whether it does.

    Not where the environment says how the heap is to be run, or where another library runs it.
    """
    said = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if said or platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not any(mallopt(_M_MMAP_THRESHOLD, size) for size in _THRESHOLDS):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
