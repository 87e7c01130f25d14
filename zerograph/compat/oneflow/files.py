"""``flow.save`` and ``flow.load``: plain files of torch, with whole tensors, from and for global ones."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerograph._torch import pytree
from zerograph.compat.oneflow.placements import mesh_of, placement
from zerograph.compat.oneflow.tensors import cut, to_global, whole_of
from zerograph.errors import ConfigError
from zerograph.graph import ZeroGraph
from zerograph.ir.sbp import all_broadcast, broadcast
from zerograph.runtime.job.process_group import agree, join, rank, world_size

# Seconds that ranks wait for the one that reads or writes.
_PATIENCE = 600.0


def save(
    obj: Any,
    path: str | os.PathLike[str],
    global_dst_rank: int | None = None,
    save_as_external_data: bool = False,
) -> None:
    """Write any nesting of tensors and plain values to a file that ``torch.load`` reads, also ``weights_only``.

    Global tensors are written whole, which is a collective. A file appears complete or not at all.

    Args:
        obj: the values.
        path: the file.
        save_as_external_data: not supported.
        global_dst_rank: this rank alone writes; all return when it has. Without it, every rank that calls this writes
            to its ``path``, which may be the same for all.

    Raises:
        ConfigError: no such rank, a graph instead of its ``state_dict()``, or ``save_as_external_data``.
        RankMismatchError: the rank that was to write could not (there: its own error).
    """
    if isinstance(obj, ZeroGraph):
        raise ConfigError("flow.save() takes values, not a graph: save graph.state_dict()")
    if save_as_external_data:
        raise ConfigError("flow.save(save_as_external_data=True): there is one format only, a file of torch")
    _check_rank("global_dst_rank", global_dst_rank)
    plain = pytree.tree_map(lambda one: whole_of(one) if isinstance(one, Tensor) else one, obj)
    if global_dst_rank is None:
        _write(plain, Path(path))
        return
    problem: BaseException | None = None
    if rank() == global_dst_rank:
        try:
            _write(plain, Path(path))
        except BaseException as error:
            problem = error
    agree(join(_PATIENCE), "going on from flow.save()", 0, dict, problem)


def load(
    path: str | os.PathLike[str],
    global_src_rank: int | None = None,
    map_location: Any = None,
    *,
    support_pytorch_format: bool = True,
) -> Any:
    """Read what :func:`save` wrote, with ``torch.load(weights_only=True)``.

    Args:
        path: the file.
        global_src_rank: this rank alone reads. Tensors (but 0-d ones) are then global ones, whole on that rank:
            ``to_global(placement=, sbp=)`` brings them to others, ``module.load_state_dict()`` does so by itself.
        map_location: a device, or a placement: tensors are then global ones there, broadcast where nothing else is
            said. Default: the CPU.
        support_pytorch_format: the files are torch's own; False is refused.

    Raises:
        ConfigError: no such rank, or a directory, as OneFlow writes them.
        RankMismatchError: the rank that was to read could not (there: its own error).
    """
    if not support_pytorch_format:
        raise ConfigError("flow.load(support_pytorch_format=False): the files are torch's own; leave it out")
    _check_rank("global_src_rank", global_src_rank)
    if global_src_rank is None:
        return _mapped(_read(Path(path)), map_location)
    job = join(_PATIENCE)
    problem: BaseException | None = None
    found: Any = None
    if rank() == global_src_rank:
        try:
            found = _read(Path(path))
        except BaseException as error:
            problem = error
    agree(job, "going on from flow.load()", 0, dict, problem)
    mesh = placement("cpu", [global_src_rank]).mesh
    # What is no tensor goes to all, and of tensors what they are.
    told: list[Any] = [pytree.tree_map(described, found)]
    dist.broadcast_object_list(told, src=global_src_rank, group=job.control)
    read = found if rank() == global_src_rank else told[0]
    return _mapped(pytree.tree_map(lambda one: _on_one_rank(one, mesh), read), map_location)


@dataclass(frozen=True)
class _Told:
    """What other ranks are told of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def described(value: Any) -> Any:
    """Return what other ranks are told of a value: of a tensor its shape and dtype, all else itself."""
    # A number is told as it is: torch has no 0-d global tensor on some of the ranks.
    return _Told(value.shape, value.dtype) if isinstance(value, Tensor) and value.dim() else value


def undescribed(value: Any) -> Any:
    """Return a tensor of any values for one that was :func:`described`; all else itself."""
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, _Told) else value


def _on_one_rank(value: Any, mesh: DeviceMesh) -> Any:
    value = undescribed(value)
    return cut(value, mesh, all_broadcast(mesh.ndim)) if isinstance(value, Tensor) and value.dim() else value


def _mapped(found: Any, location: Any) -> Any:
    if location is None:
        return found
    if isinstance(location, placement):
        mesh = mesh_of(location)
        sbp = (broadcast,) * mesh.ndim
        return pytree.tree_map(lambda one: to_global(one, mesh, sbp) if isinstance(one, Tensor) else one, found)
    return pytree.tree_map(lambda one: one.to(location) if isinstance(one, Tensor) else one, found)


def _check_rank(name: str, number: int | None) -> None:
    good = number is None or (isinstance(number, int) and not isinstance(number, bool) and 0 <= number < world_size())
    if not good:
        raise ConfigError(f"{name}={number!r}: give a rank from 0 to {world_size() - 1}, or None")


def _read(path: Path) -> Any:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: flow.load() reads files of torch, OneFlow's own formats it does not")
    return torch.load(path, map_location="cpu", weights_only=True)


def _write(value: Any, path: Path) -> None:
    # Under another name first: ranks may write the same file, and a reader finds all of it.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        torch.save(value, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
