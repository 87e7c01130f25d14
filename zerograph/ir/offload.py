"""The option ``offload``: optimizer state, parameters and activations in CPU memory or files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

import torch

from zerograph.base.options import is_one_of, is_whole_number
from zerograph.errors import ConfigError
from zerograph.ir.buckets import Folder

Device = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class OffloadTo:
    """Where optimizer state or parameters are between steps.

    Attributes:
        device: ``"cpu"``: CPU memory. ``"nvme"``: one file for each rank, read and written with direct I/O where
            possible, while other buckets are updated. The state of three buckets is in memory at once; a smaller
            ``bucket_size`` lowers that.
        nvme_path: the directory of the files. It must be writable and have space for all of the state.
        pin_memory: keep shards in pinned memory, from which an accelerator copies asynchronously.
        fast_init: do not write the initial zeros of optimizer state to a new file, whose empty blocks read as zeros.
            False allocates all blocks before the first step.
        max_in_cpu: with ``"nvme"``, bytes of a rank's parameters that stay in memory.
        keep_files: keep the files when the process exits or the graph is deleted.

    Raises:
        ConfigError: there is no such device, or ``nvme_path`` is missing.
    """

    device: Device
    # Ranks do not compare it: paths may differ between machines.
    nvme_path: str | os.PathLike[str] | None = field(default=None, repr=False)
    pin_memory: bool = True
    fast_init: bool = True
    max_in_cpu: int = 0
    keep_files: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.nvme_path, os.PathLike):
            object.__setattr__(self, "nvme_path", os.fspath(self.nvme_path))
        if message := _complaint(self):
            raise ConfigError(f"offload to {self.device!r:.60}: {message}")

    @property
    def folder(self) -> Folder | None:
        """The directory of the files; None for the CPU."""
        return None if self.nvme_path is None else Folder(os.fspath(self.nvme_path), self.keep_files, self.fast_init)


@dataclass(frozen=True, init=False)
class Offload:
    """The optimizer state, parameters and activations that are offloaded. Numbers stay the same.

    ``zg.Offload(optimizer="cpu")``, or with options ``zg.Offload(optimizer=zg.OffloadTo("nvme", "/scratch"))``.

    Attributes:
        optimizer: the optimizer's state. For a model on an accelerator, split parameters and their update are
            offloaded to the CPU too: separate streams copy shards to the accelerator for each gather, in the compute
            dtype, and reduced gradients to the CPU. A fused optimizer uses its CPU kernel, on the rank's share of the
            cores. This needs a ZeRO stage, on one rank too. Below ``shard_min_size`` parameters stay on the
            accelerator. For a model on the CPU only ``"nvme"`` has an effect. None: on the device of the model.
        parameters: split parameters, at ZeRO stage 3. For a model on an accelerator ``optimizer`` must be set too,
            because shards are updated where they are stored. That already keeps shards in CPU memory at every stage,
            so only ``"nvme"`` adds to it: files are read for each gather and for the update. Parameters below
            ``shard_min_size``, which are whole on each rank, stay in memory. None: on the device of the model.
        activations: those of an accelerator, in CPU memory between forward and backward: those of the first layers,
            as many as can be copied while forward computes. No effect on the CPU.

    Raises:
        ConfigError: a part is something else.
    """

    optimizer: OffloadTo | None
    parameters: OffloadTo | None
    activations: bool

    def __init__(
        self,
        optimizer: OffloadTo | Device | None = None,
        parameters: OffloadTo | Device | None = None,
        activations: bool = False,
    ) -> None:
        for name, value in (("optimizer", optimizer), ("parameters", parameters)):
            to = OffloadTo(value) if isinstance(value, str) else value
            if to is not None and not isinstance(to, OffloadTo):
                raise ConfigError(f"Offload({name}={value!r:.60}): give 'cpu', a zg.OffloadTo, or None")
            object.__setattr__(self, name, to)
        if not isinstance(activations, bool):
            raise ConfigError(f"Offload(activations={activations!r:.60}): choose True or False")
        object.__setattr__(self, "activations", activations)


def _complaint(to: OffloadTo) -> str:
    """Return what is wrong with the target; empty for a valid one."""
    if not is_one_of(to.device, "cpu", "nvme"):
        return "unknown device; choose 'cpu', 'nvme', or None to offload nothing"
    if to.nvme_path is not None and not isinstance(to.nvme_path, str):
        return f"nvme_path = {to.nvme_path!r:.60}: give a directory, as text or as a path"
    if to.device == "nvme" and to.nvme_path is None:
        return "give nvme_path, a directory on the disk for the files of the state"
    if to.device == "cpu" and to.nvme_path is not None:
        return "nvme_path is for the device 'nvme'"
    for name in ("pin_memory", "fast_init", "keep_files"):
        if not isinstance(getattr(to, name), bool):
            return f"{name}: choose True or False"
    return "" if is_whole_number(to.max_in_cpu, 0) else "max_in_cpu: give a whole number of bytes, 0 or more"


def offload_device(option: OffloadTo | None, device: torch.device, *, whole: bool) -> torch.device | None:
    """Return the device that stores and updates a bucket if it is not the device that computes with it, else None.

    Buckets that each rank holds whole are not offloaded: modules use their memory.

    Args:
        option: the offload option.
        device: the device that computes.
        whole: the bucket is broadcast.
    """
    return torch.device("cpu") if option is not None and device.type != "cpu" and not whole else None
