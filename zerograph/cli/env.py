"""``zerograph env``: facts of this machine for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zerograph.base.sizes import show_bytes
from zerograph.cli.failing import as_json

_PACKAGES = ("zerograph", "torch", "numpy", "networkx", "safetensors", "rich", "typer", "filelock", "transformers")
_OPTIONAL_PACKAGES = ("triton", "deepspeed")
# Only variables that change the behaviour of zerograph or torch: others may be private.
_PREFIXES = ("ZEROGRAPH_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "MKL_", "NCCL_", "GLOO_", "MALLOC_")
_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def env(json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Print versions, backends, devices, memory and environment variables, for a bug report.

    Example: zerograph env
    """
    sections = facts()
    if json:
        as_json(sections)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in sections.items():
        table.add_row(f"[bold]{section}[/bold]", "")
        for name, value in entries.items() or [("none", "")]:
            table.add_row(f"  {name}", str(value))
    Console(soft_wrap=True).print(table)


def facts() -> dict[str, dict[str, Any]]:
    """Return the facts by section and name."""
    import torch

    return {
        "system": {
            "platform": platform.platform(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "cores": _cores(),
            "memory": _memory(),
            "/dev/shm": _shared(),
        },
        "packages": _packages(),
        "torch": {
            "cuda": _cuda_version(),
            "distributed backends": ", ".join(_backends()) or "none",
            "inductor's C++ compiler": _compiler(),
            "threads": torch.get_num_threads(),
        },
        "devices": _devices(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _is_relevant(name)},
    }


def _is_relevant(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in (*_VARIABLES, *_OF_RANKS)


def _packages() -> dict[str, str]:
    versions = {}
    for name in (*_PACKAGES, *_OPTIONAL_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in _OPTIONAL_PACKAGES:
                versions[name] = "not installed"
    import torch

    # With the build, which the version of the package leaves out.
    return versions | {"torch": torch.__version__}


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}"


def _memory() -> str:
    try:
        return show_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return "unknown"


def _shared() -> str:
    """Return the size of shared memory, through which processes of one machine exchange tensors."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return "none"
    usage = shutil.disk_usage(path)
    return f"{show_bytes(usage.free)} free of {show_bytes(usage.total)}"


def _cuda_version() -> str:
    import torch

    return str(torch.version.cuda or torch.version.hip or "none: built for CPU")


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, available in backends.items() if available]


def _compiler() -> str:
    name = os.environ.get("CXX")
    if name:
        return shutil.which(name) or f"none ({name} is not installed)"
    return shutil.which("g++") or shutil.which("clang++") or "none: backend 'inductor' needs one on CPU"


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": platform.processor() or platform.machine()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"capability {properties.major}.{properties.minor}"
        devices[f"cuda:{index}"] = f"{properties.name}, {show_bytes(properties.total_memory)}, {capability}"
    return devices
