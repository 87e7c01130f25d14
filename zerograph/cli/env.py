"""zerograph env: what a bug report needs to say of a machine."""

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
_PACKAGES_OF_OTHERS = ("triton", "deepspeed", "tensorboard")
# What changes what zerograph or torch do; values of others are nobody's business.
_VARIABLES = (
    "ZEROGRAPH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def env(json: Annotated[bool, typer.Option("--json", help="for machines")] = False) -> None:
    """Versions, backends, devices, memory and environment variables: what a bug report needs.

    Example: zerograph env
    """
    found = facts()
    if json:
        as_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in found.items():
        table.add_row(f"[bold]{section}[/bold]", "")
        for name, value in entries.items() or [("none", "")]:
            table.add_row(f"  {name}", str(value))
    Console(soft_wrap=True).print(table)


def facts() -> dict[str, dict[str, Any]]:
    """Return what there is to say, by section and name."""
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
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _tells(name)},
    }


def _tells(name: str) -> bool:
    return any(name == one or (one.endswith("_") and name.startswith(one)) for one in _VARIABLES)


def _packages() -> dict[str, str]:
    found = {}
    for name in (*_PACKAGES, *_PACKAGES_OF_OTHERS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in _PACKAGES_OF_OTHERS:
                found[name] = "not installed"
    import torch

    # With what it was built for, which its package's own version leaves out.
    return found | {"torch": torch.__version__}


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}"


def _memory() -> str:
    try:
        return show_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return "unknown"


def _shared() -> str:
    """Shared memory, which processes of one machine exchange through."""
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
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, available in there.items() if available]


def _compiler() -> str:
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")
    return found or f"none ({named} is not there)" if named else found or "none: backend 'inductor' needs one on CPU"


def _devices() -> dict[str, str]:
    import torch

    found = {"cpu": platform.processor() or platform.machine()}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{about.name}, {show_bytes(about.total_memory)}, capability {about.major}.{about.minor}"
        )
    return found
