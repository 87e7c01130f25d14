"""``flow.save`` and ``flow.load``: files of torch with whole tensors, also for global tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.base.cache import replacing
from zerograph.compat.oneflow.placements import mesh_of, placement
from zerograph.compat.oneflow.tensors import cut, to_global, whole_of
from zerograph.errors import ConfigError
from zerograph.graph import ZeroGraph
from zerograph.ir.sbp import all_broadcast, broadcast
from zerograph.runtime.job.process_group import agreeing, join, rank, world_size

# Seconds that ranks wait for the rank that reads or writes.
_TIMEOUT = 600.0


def save(
    obj: Any, path: str | os.PathLike[str], global_dst_rank: int | None = None, save_as_external_data: bool = False
) -> None:
    """Write any nesting of tensors and plain values to a file that ``torch.load`` reads, also ``weights_only``.

    Global tensors are written whole, which is a collective. The file is replaced atomically.

    Args:
        obj: the values.
        path: the file.
        global_dst_rank: the only rank that writes; all ranks return after it has. Without it, every rank that calls
            this writes to its ``path``, which may be the same for all.
        save_as_external_data: not supported.

    Raises:
        ConfigError: there is no such rank, ``obj`` is a graph, or ``save_as_external_data`` is True.
        RankMismatchError: the writing rank failed (on that rank its own error is raised).
    """
    if isinstance(obj, ZeroGraph):
        raise ConfigError("flow.save() takes values, not a graph: save graph.state_dict()")
    if save_as_external_data:
        raise ConfigError("flow.save(save_as_external_data=True): files of torch are the only format")
    _check_rank("global_dst_rank", global_dst_rank)
    plain = pytree.tree_map_only(Tensor, whole_of, obj)
    if global_dst_rank is None:
        _write(plain, Path(path))
        return
    _on_rank(global_dst_rank, "flow.save()", lambda: _write(plain, Path(path)))


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
        global_src_rank: the only rank that reads. Tensors, except 0-d ones, are then global tensors that are whole on
            that rank. ``to_global(placement=, sbp=)`` and ``module.load_state_dict()`` move them to other ranks.
        map_location: a device, or a placement: then tensors are global ones with the SBP broadcast. Default: the CPU.
        support_pytorch_format: True; files of torch are the only format.

    Returns:
        The values.

    Raises:
        ConfigError: there is no such rank, ``path`` is a directory, or ``support_pytorch_format`` is False.
        RankMismatchError: the reading rank failed (on that rank its own error is raised).
    """
    if not support_pytorch_format:
        raise ConfigError("flow.load(support_pytorch_format=False): the files are torch's own; leave it out")
    _check_rank("global_src_rank", global_src_rank)
    if global_src_rank is None:
        return _mapped(_read(Path(path)), map_location)
    values = _on_rank(global_src_rank, "flow.load()", lambda: _read(Path(path)))
    mesh = placement("cpu", [global_src_rank]).mesh
    like = shared(values, global_src_rank)
    own = values if rank() == global_src_rank else like
    sbp = all_broadcast(mesh.ndim)
    placed = pytree.tree_map_only(Tensor, lambda value: cut(value, mesh, sbp) if value.dim() else value, own)
    return _mapped(placed, map_location)


def _on_rank(number: int, call: str, act: Callable[[], Any]) -> Any:
    """Act on one rank, and return the result there; all ranks return after it has, or raise if it has failed."""
    with agreeing(join(_TIMEOUT), f"continuing after {call}"):
        return act() if rank() == number else None


def shared(values: Any, source: int) -> Any:
    """Return one rank's values on all ranks, with empty tensors of the same shapes and dtypes. A collective."""
    own = None
    if rank() == source:
        # A 0-d tensor is sent itself: torch has no 0-d global tensors on some of the ranks.
        own = pytree.tree_map_only(Tensor, lambda one: _empty(one, "meta") if one.dim() else one, values)
    sent = join(_TIMEOUT).channel.broadcast(own, source)
    return pytree.tree_map_only(Tensor, lambda one: _empty(one, "cpu") if one.is_meta else one, sent)


def _empty(like: Tensor, device: str) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _mapped(values: Any, location: Any) -> Any:
    if location is None:
        return values
    if isinstance(location, placement):
        mesh = mesh_of(location)
        return pytree.tree_map_only(Tensor, lambda value: to_global(value, mesh, (broadcast,) * mesh.ndim), values)
    return pytree.tree_map_only(Tensor, lambda value: value.to(location), values)


def _check_rank(name: str, number: int | None) -> None:
    good = number is None or (isinstance(number, int) and not isinstance(number, bool) and 0 <= number < world_size())
    if not good:
        raise ConfigError(f"{name}={number!r}: give a rank from 0 to {world_size() - 1}, or None")


def _read(path: Path) -> Any:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: flow.load() reads files of torch, but not OneFlow's own formats")
    return torch.load(path, map_location="cpu", weights_only=True)


def _write(value: Any, path: Path) -> None:
    # Ranks may write the same file, and a reader must see a complete one.
    with replacing(path) as beside:
        torch.save(value, beside)
