"""Remember on disk which vector instructions Inductor has seen to work: it tries them in every process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

_OF_PROCESSOR = ("model name", "flags", "Features", "CPU part")


@contextlib.contextmanager
def remembered_vector_units() -> Iterator[None]:
    """Let Inductor inside the block try vector instructions once for each machine, compiler and version of torch.

    A trial compiles a library, once, and loads it in a process of its own, in every process that compiles. The empty
    file of a trial that succeeded is in Inductor's cache folder. A failed trial is repeated.
    """
    attempt = cpu_vec_isa.VecISA.check_build

    def check_build(unit: Any, code: str) -> bool:
        compiler = cpu_vec_isa._get_isa_dry_compile_fingerprint(unit.build_arch_flags())
        text = "\n".join([compiler, code, str(unit), *unit.build_macro(), torch.__file__, _processor()])
        mark = Path(cache_dir()) / "zerograph" / f"{hashlib.sha256(text.encode()).hexdigest()}.works"
        if mark.exists():
            return True
        works = attempt(unit, code)
        if works:
            with contextlib.suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        return works

    with patch.object(cpu_vec_isa.VecISA, "check_build", check_build):
        yield


@functools.cache
def _processor() -> str:
    """Return what tells processors apart, as text."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = file.read(1 << 14).splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(_OF_PROCESSOR)}))
    return torch.backends.cpu.get_cpu_capability()
