"""What a graph is called with and what it gives back: any nesting of tensors, plain or global, and of constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerograph._torch import pytree
from zerograph.capture.trace import TensorSpec
from zerograph.errors import InputError, PlacementError
from zerograph.ir.annotate import is_replicated
from zerograph.ir.mesh import Mesh, piece_count
from zerograph.ir.sbp import NdSbp, Split, all_broadcast, broadcast, from_dtensor, show, to_dtensor

# What build() is given as it is: it cannot change while the step runs, and says by its text what it is.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype)


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, flat.

    Attributes:
        tensors: this rank's part of each.
        specs: global shape, dtype and device of each.
        sbp: how each is placed.
        cut: whether each is cut into micro-batches along dimension 0.
        tree: arranges ``leaves`` into ``(args, kwargs)``.
        leaves: the constants among the arguments, and the class ``Tensor`` where the next of ``tensors`` goes.
        names: what each tensor is called in messages, such as ``args[0]['ids']``.
        constants: what each constant is called, and what it is.
        mesh: the placement of the global tensors among them; None if all are plain.
        plain: whether each is a plain tensor, rather than a DTensor.
    """

    tensors: tuple[Tensor, ...]
    specs: tuple[TensorSpec, ...]
    sbp: tuple[NdSbp, ...]
    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    mesh: DeviceMesh | None
    cut: tuple[bool, ...]
    plain: tuple[bool, ...]

    def key(self) -> tuple[Any, ...]:
        """What makes a step compile again: its kind, and what constants are."""
        return self.kind(), self.constants

    def kind(self) -> tuple[Any, ...]:
        """Nesting, global shapes, dtypes, devices, placements, and where constants are."""
        where = tuple(leaf is Tensor for leaf in self.leaves)
        return self.tree, where, self.specs, self.sbp, self.mesh is None

    def arranged(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other tensors in the places of these, among the same constants, as ``(args, kwargs)``."""
        args, kwargs = _arranged(tensors, self.leaves, self.tree)
        return args, kwargs

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Batch:
        """Return the same batch but for its tensors, which are of the same metadata."""
        other = object.__new__(Batch)
        vars(other).update(vars(self), tensors=tensors)
        return other

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks, in words."""
        found = {
            f"input {name}": f"local shape {tuple(tensor.shape)}, {tensor.dtype}, {show(sbp)}"
            for name, tensor, sbp in zip(self.names, self.tensors, self.sbp, strict=True)
        }
        return {"the nesting of the inputs": str(self.tree), **dict(self.constants), **found}


def read_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    grid: Any,
    plain: NdSbp,
    micro_batches: int = 1,
    meta: torch.device | None = None,
) -> Batch:
    """Read the arguments of a call: plain tensors are ``plain`` (0-d and replicated ones B), DTensors what they say.

    Plain tensors are cut into micro-batches, but not 0-d and replicated ones; so are DTensors that some ranks split
    along dimension 0.

    Args:
        mesh, grid: the graph's ranks, as one of them sees them and as a nested list of their numbers.
        micro_batches: how many there are.
        meta: the device that tensors on the meta device stand for.

    Raises:
        InputError: something that is no tensor and no constant, wants a gradient, or cannot be cut into micro-batches.
        PlacementError: a global tensor on other ranks than the graph's, or split unevenly.
    """
    given, tree = _flattened((args, kwargs))
    constants = [(f"input {name}", f"{type(leaf).__name__} {leaf!r}") for name, leaf in given if _is_constant(leaf)]
    inputs = [(name, leaf) for name, leaf in given if not _is_constant(leaf)]
    names = tuple(name for name, _ in inputs)
    read = [_read(leaf, name, mesh, grid, plain) for name, leaf in inputs]
    cut = tuple(
        tensor.dim() > 0 and (Split(0) in sbp if isinstance(leaf, DTensor) else not is_replicated(leaf))
        for (_, leaf), (tensor, _, sbp) in zip(inputs, read, strict=True)
    )
    _check_micro_batches([tensor for tensor, _, _ in read], names, cut, micro_batches)
    meshes = [leaf.device_mesh for _, leaf in inputs if isinstance(leaf, DTensor)]
    return Batch(
        tuple(local for local, _, _ in read),
        tuple(
            replace(spec, device=meta) if meta is not None and spec.device.type == "meta" else spec
            for _, spec, _ in read
        ),
        tuple(sbp for _, _, sbp in read),
        tree,
        tuple(leaf if _is_constant(leaf) else Tensor for _, leaf in given),
        names,
        tuple(constants),
        meshes[0] if meshes else None,
        cut,
        tuple(not isinstance(leaf, DTensor) for _, leaf in inputs),
    )


# By nesting: the names of the leaves, and what arranges them.
_nestings: dict[Any, tuple[list[str], pytree.TreeSpec]] = {}
_NESTINGS = 1000


def _flattened(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Return the leaves with their names, and the tree. Torch's own way takes long beside a small step."""
    leaves: list[Any] = []
    nesting = leaves_of(arguments, leaves)
    found = None if nesting is None else _nestings.get(nesting)
    if found is not None:
        names, tree = found
        return list(zip(names, leaves, strict=True)), tree
    given, tree = pytree.tree_flatten_with_path(arguments)
    names = [_name(path) for path, _ in given]
    if nesting is not None and len(_nestings) < _NESTINGS:
        _nestings[nesting] = names, tree
    return [(name, leaf) for name, (_, leaf) in zip(names, given, strict=True)], tree


def leaves_of(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves and return how they are nested, to be compared; None for kinds that only torch takes apart."""
    kind = type(value)
    if kind is dict:
        inner, about = value.values(), tuple(value)
    elif kind is tuple or kind is list:
        inner, about = value, ()
    elif kind is Tensor or kind in _CONSTANTS:
        leaves.append(value)
        return _LEAF
    else:
        return None
    nestings = tuple([leaves_of(one, leaves) for one in inner])
    return None if None in nestings else (kind, about, nestings)


_LEAF = "leaf"


def _is_constant(leaf: Any) -> bool:
    # Those of a subclass may be more than their text.
    return type(leaf) in _CONSTANTS


def _check_micro_batches(
    tensors: Sequence[Tensor], names: Sequence[str], cut: Sequence[bool], micro_batches: int
) -> None:
    if micro_batches == 1:
        return
    doing = f"config.gradient_accumulation_steps = {micro_batches}"
    if not any(cut):
        raise InputError(f"{doing} cuts the batch along dimension 0, but no input has one that is split: give one")
    for tensor, name, one in zip(tensors, names, cut, strict=True):
        if one and (len(tensor) % micro_batches or not len(tensor)):
            raise InputError(
                f"{name} has {len(tensor)} samples on this rank, which {doing} does not divide\n"
                "Give every rank a multiple of it, or choose a number of micro-batches that divides them. What is no "
                "batch goes in as a 0-d tensor, as zg.replicated(x), or as an attribute of the graph."
            )


def _read(leaf: Any, name: str, mesh: Mesh, grid: Any, plain: NdSbp) -> tuple[Tensor, TensorSpec, NdSbp]:
    if not isinstance(leaf, Tensor):
        raise InputError(
            f"{name} is {leaf!r:.60}, not a tensor\n"
            "A graph takes tensors, numbers, strings and None, in lists, tuples and dicts. Make it a tensor "
            "(torch.tensor(...)), or, if it never changes, an attribute of the graph."
        )
    if leaf.requires_grad:
        raise InputError(f"{name} requires a gradient, which a graph does not return: give {name}.detach()")
    if isinstance(leaf, DTensor):
        return _read_global(leaf, name, mesh, grid)
    if leaf.layout is not torch.strided:
        raise InputError(f"{name} has the layout {leaf.layout}: give a dense tensor ({name}.to_dense())")
    if leaf.dim() == 0 or is_replicated(leaf):
        return leaf.contiguous(), TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.device), all_broadcast(mesh.dims)
    shape = (leaf.shape[0] * piece_count(plain, mesh), *leaf.shape[1:])
    return leaf.contiguous(), TensorSpec(shape, leaf.dtype, leaf.device), plain


def _read_global(leaf: DTensor, name: str, mesh: Mesh, grid: Any) -> tuple[Tensor, TensorSpec, NdSbp]:
    placed = leaf.device_mesh
    if placed.mesh.tolist() != grid:
        raise PlacementError(
            f"{name} is placed on the ranks {placed.mesh.tolist()}, the graph runs on {grid}\n"
            f"Redistribute it to zg.placement({placed.device_type!r}, ranks={grid}), or set config.placement."
        )
    sbp = from_dtensor(leaf.placements)
    for dim in {one.dim for one in sbp if isinstance(one, Split)}:
        parts = piece_count(tuple(one if one == Split(dim) else broadcast for one in sbp), mesh)
        if leaf.shape[dim] % parts:
            raise PlacementError(
                f"{name} of shape {tuple(leaf.shape)} is {show(sbp)}: {leaf.shape[dim]} does not divide by {parts}"
            )
    local = leaf.to_local().contiguous()
    return local, TensorSpec(tuple(leaf.shape), leaf.dtype, local.device), sbp


def _name(path: Sequence[Any]) -> str:
    """``args[0]['ids']``, or just ``ids`` for the keyword argument of that name."""
    outer, first, *rest = path
    start = f"args[{first.idx}]" if outer.idx == 0 else str(first.key)
    return start + pytree.keystr(tuple(rest))


def give_back(
    values: Sequence[Tensor],
    sbp: Sequence[NdSbp],
    shapes: Sequence[tuple[int, ...]],
    returned: Sequence[Any],
    tree: pytree.TreeSpec,
    mesh: DeviceMesh | None,
) -> Any:
    """The step's flat outputs as ``build()`` returned them; global where the batch was (0-d ones stay plain).

    Args:
        values: the tensors, this rank's part of each; ``sbp`` and global ``shapes`` of the same.
        returned: one entry for each leaf of ``tree``: the class ``Tensor`` where the next of ``values`` goes.
    """
    tensors = [
        _as_global(value, one, shape, mesh) if mesh is not None and shape else value
        for value, one, shape in zip(values, sbp, shapes, strict=True)
    ]
    return _arranged(tensors, returned, tree)


def _arranged(tensors: Sequence[Tensor], leaves: Sequence[Any], tree: pytree.TreeSpec) -> Any:
    following = iter(tensors)
    return pytree.tree_unflatten([next(following) if leaf is Tensor else leaf for leaf in leaves], tree)


def _as_global(value: Tensor, sbp: NdSbp, shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value.contiguous(), mesh, to_dtensor(sbp), run_check=False, shape=torch.Size(shape), stride=stride
    )
