"""The option to let optimizer state or parameters rest elsewhere than on the device that computes with them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from zerograph.ir.buckets import Folder

Device = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class Offload:
    """Where tensors rest; see :meth:`zerograph.config.Config.offload_optimizer` and ``offload_parameters``."""

    device: Device
    # Another on each machine, perhaps: nothing that ranks compare.
    nvme_path: str | None = field(default=None, repr=False)
    pin_memory: bool = True
    fast_init: bool = True
    max_in_cpu: int = 0
    keep_files: bool = False

    @property
    def folder(self) -> Folder | None:
        """The directory of the files; None where there are none."""
        return None if self.nvme_path is None else Folder(self.nvme_path, self.keep_files, self.fast_init)


def offload_device(option: Offload | None, device: torch.device, *, whole: bool) -> torch.device | None:
    """In whose memory a bucket rests, and is updated, if not in that of the device that computes with it; else None.

    What each rank holds whole stays: it is lent to the modules as it is.
    """
    return torch.device("cpu") if option is not None and device.type != "cpu" and not whole else None


def complaint(value: Any) -> str:
    """What is wrong with a value of the option; empty if nothing is."""
    if value is None:
        return ""
    if not isinstance(value, Offload):
        return "set it by config.offload_optimizer(...) or config.offload_parameters(...)"
    if not isinstance(value.device, str) or value.device not in ("cpu", "nvme"):
        return "unknown device; choose 'cpu', 'nvme', or None to offload nothing"
    if value.device == "nvme" and not isinstance(value.nvme_path, (str, os.PathLike)):
        return "give nvme_path, a directory on the disk whose files the state is to rest in"
    if value.device == "cpu" and value.nvme_path is not None:
        return "nvme_path is for the device 'nvme'"
    for name in ("pin_memory", "fast_init", "keep_files"):
        if not isinstance(getattr(value, name), bool):
            return f"{name}: choose True or False"
    whole = isinstance(value.max_in_cpu, int) and not isinstance(value.max_in_cpu, bool)
    return "" if whole and value.max_in_cpu >= 0 else "max_in_cpu: give a whole number of bytes, 0 or more"
