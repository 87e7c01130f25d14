"""The options that offload optimizer state or parameters to the CPU or to files between steps."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from zerograph.errors import ConfigError
from zerograph.ir.buckets import Folder

Device = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class Offload:
    """An offload target; see :meth:`zerograph.config.Config.offload_optimizer` and ``offload_parameters``."""

    device: Device
    # Ranks do not compare it: paths may differ between machines.
    nvme_path: str | None = field(default=None, repr=False)
    pin_memory: bool = True
    fast_init: bool = True
    max_in_cpu: int = 0
    keep_files: bool = False

    @property
    def folder(self) -> Folder | None:
        """The directory of the files; None for the CPU."""
        return None if self.nvme_path is None else Folder(self.nvme_path, self.keep_files, self.fast_init)


def offload_to(device: Any, nvme_path: Any, *options: Any) -> Offload | None:
    """Return the target of these arguments, or None without a device.

    Raises:
        ConfigError: ``nvme_path`` is not a path.
    """
    if nvme_path is not None and not isinstance(nvme_path, (str, os.PathLike)):
        raise ConfigError(f"nvme_path = {nvme_path!r:.60}: give a directory, as text or as a path")
    return None if device is None else Offload(device, None if nvme_path is None else os.fspath(nvme_path), *options)


def offload_device(option: Offload | None, device: torch.device, *, whole: bool) -> torch.device | None:
    """Return the device that stores and updates a bucket if it is not the device that computes with it, else None.

    Buckets that each rank holds whole are not offloaded: modules use their memory.

    Args:
        option: the offload option.
        device: the device that computes.
        whole: the bucket is broadcast.
    """
    return torch.device("cpu") if option is not None and device.type != "cpu" and not whole else None


def complaint(value: Any) -> str:
    """Return what is wrong with a value of the option; empty for a valid one."""
    if value is None:
        return ""
    if not isinstance(value, Offload):
        return "set it by config.offload_optimizer(...) or config.offload_parameters(...)"
    if not isinstance(value.device, str) or value.device not in ("cpu", "nvme"):
        return "unknown device; choose 'cpu', 'nvme', or None to offload nothing"
    if value.device == "nvme" and not isinstance(value.nvme_path, (str, os.PathLike)):
        return "give nvme_path, a directory on the disk for the files of the state"
    if value.device == "cpu" and value.nvme_path is not None:
        return "nvme_path is for the device 'nvme'"
    for name in ("pin_memory", "fast_init", "keep_files"):
        if not isinstance(getattr(value, name), bool):
            return f"{name}: choose True or False"
    whole = isinstance(value.max_in_cpu, int) and not isinstance(value.max_in_cpu, bool)
    return "" if whole and value.max_in_cpu >= 0 else "max_in_cpu: give a whole number of bytes, 0 or more"
