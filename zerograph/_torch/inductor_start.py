"""Start Inductor in less time: templates are compiled when used, and vector instructions tried once per machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

_OF_PROCESSOR = ("model name", "flags", "Features", "CPU part")


@functools.cache
def import_inductor() -> None:
    """Import Inductor. The templates of its kernels for accelerators are compiled when they are used.

    To compile them all is a third of the import, and a step on CPU uses none.
    """
    from torch._inductor.codegen.common import KernelTemplate

    compile_template = KernelTemplate._template_from_string

    def later(source: str) -> _Template:
        return _Template(compile_template, source)

    with patch.object(KernelTemplate, "_template_from_string", staticmethod(later)):
        importlib.import_module("torch._inductor.compile_fx")


class _Template:
    """A template that is compiled when an attribute of it is read."""

    def __init__(self, compile_template: Callable[[str], Any], source: str) -> None:
        self._compiled = functools.cache(lambda: compile_template(source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled(), name)


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
        if os.path.exists(mark):  # Path.exists() raises where the folder cannot be searched
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
