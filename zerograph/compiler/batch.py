"""The arguments and the result of a call of a graph: any nesting of tensors, plain or global, and of constants."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerograph._torch import pytree
from zerograph.capture.trace import TensorSpec
from zerograph.compiler.input_layout import batch_on, is_sequence, sequence_length
from zerograph.config import Config
from zerograph.errors import InputError, PlacementError
from zerograph.ir.annotate import is_replicated
from zerograph.ir.dims import Dim
from zerograph.ir.marks import Marks, marks_of
from zerograph.ir.mesh import Mesh, global_shape, piece_count
from zerograph.ir.sbp import NdSbp, Split, all_broadcast, broadcast, from_dtensor, is_dtensor, show, to_dtensor
from zerograph.runtime.job.differences import SHOWN_WITH

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# SBP of an output of a graph, and the graph's ranks as a nested list.
Layout = tuple[NdSbp, Any]
_LAYOUT = "_zerograph_layout"

# Types of the constants that build() gets unchanged. They are immutable, and their repr() is their value.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype)


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, flattened.

    Attributes:
        tensors: this rank's part of each tensor.
        specs: global shape, dtype and device of each tensor.
        sbp: placement of each tensor.
        tree: the nesting of ``leaves`` in ``(args, kwargs)``.
        leaves: the constants among the arguments, and the class ``Tensor`` in place of each tensor.
        names: name of each tensor in messages, such as ``args[0]['ids']``.
        constants: name of each constant in messages, and its type and value as text.
        mesh: device mesh of the DTensors among them; None if all tensors are plain.
        cut: for each tensor, True if it is cut into micro-batches along dimension 0.
        plain: for each tensor, True if it is a plain tensor, False if it is a DTensor.
        parts: for each tensor, True if it is a plain tensor of which each rank has a part: neither 0-d nor replicated.
        micro_batches: number of micro-batches.
        cut_by: the option that says so, in messages.
        slices: ``config.virtual_ranks``.
        marks: for each tensor the limits of its dimensions that the user marked as dynamic.
        sizes: the sizes of each dynamic dimension in this call: of rows for each part that mesh dimensions make, in
            row-major order, else one.
        variant: number of the form of the sizes that one step serves.
        passed: the inputs as the user passed them, if this rank's part is a piece of whole sequences.
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
    parts: tuple[bool, ...]
    micro_batches: int = 1
    cut_by: str = ""
    slices: int | None = None
    marks: tuple[Marks, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    variant: int = 0
    passed: tuple[Tensor, ...] = ()

    def pattern(self) -> tuple[Hashable, Hashable]:
        """Return what must be equal on all ranks, and the marks.

        That is the kind without sizes of plain inputs, with constants; and the micro-batches, into which symbolic sizes
        are cut.
        """
        is_tensor = tuple(leaf is Tensor for leaf in self.leaves)
        inputs = tuple(
            (len(spec.shape) if is_part else spec.shape, spec.dtype, spec.device)
            for is_part, spec in zip(self.parts, self.specs, strict=True)
        )
        kind = self.tree, is_tensor, inputs, self.sbp, self.mesh is None, self.constants, self.micro_batches
        return kind, self.marks

    def resolved(self, specs: tuple[TensorSpec, ...], sizes: Mapping[str, tuple[int, ...]], variant: int) -> Batch:
        """Return the batch with global shapes, and the sizes of their dynamic dimensions.

        A tensor without rows takes its other dimensions from the ranks that have some.
        """
        tensors = tuple(
            _without_rows(tensor, spec.shape, sizes) if is_part and not len(tensor) else tensor
            for tensor, spec, is_part in zip(self.tensors, specs, self.parts, strict=True)
        )
        is_resolved = specs is self.specs and sizes is self.sizes and variant == self.variant
        if is_resolved and all(map(operator.is_, tensors, self.tensors)):
            return self
        # As in with_tensors().
        batch = object.__new__(Batch)
        vars(batch).update(vars(self), tensors=tensors, specs=specs, sizes=sizes, variant=variant)
        return batch

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for batches that one compiled step serves: the kind and the constants."""
        return self.kind(), self.constants, self.variant

    def kind(self) -> tuple[Any, ...]:
        """Return nesting, global shapes, dtypes, devices, placements, and the positions of constants."""
        is_tensor = tuple(leaf is Tensor for leaf in self.leaves)
        return self.tree, is_tensor, self.specs, self.sbp, self.mesh is None

    def arranged(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with ``tensors`` in place of this batch's."""
        args, kwargs = _arranged(tensors, self.leaves, self.tree)
        return args, kwargs

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Batch:
        """Return this batch with other tensors, which must have the same metadata."""
        # dataclasses.replace() takes long beside a small step.
        batch = object.__new__(Batch)
        vars(batch).update(vars(self), tensors=tensors, passed=())
        return batch

    def shapes(self) -> dict[str, str]:
        """Return the shapes of plain inputs as texts that are shown with their facts; ranks may differ in rows."""
        return {
            f"input {name}{SHOWN_WITH}": f", of shape {tuple(tensor.shape)}"
            for name, tensor, is_part in zip(self.names, self.tensors, self.parts, strict=True)
            if is_part
        }

    def facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks, as text by name."""
        inputs = {
            f"input {name}": (f"{tensor.dim()} dimensions" if is_part else f"local shape {tuple(tensor.shape)}")
            + f", {tensor.dtype}, {show(sbp)}"
            + (f", dynamic dimensions with their limits {dict(marks)}" if marks else "")
            for name, tensor, sbp, is_part, marks in zip(
                self.names, self.tensors, self.sbp, self.parts, self.marks, strict=True
            )
        }
        return {"the nesting of the inputs": str(self.tree), **dict(self.constants), **inputs}


def read_batch(
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    mesh: Mesh,
    grid: Any,
    config: Config,
    micro_batches: int,
    meta: torch.device | None = None,
) -> Batch:
    """Read the arguments of a call.

    Plain tensors are cut into micro-batches, except 0-d and replicated ones. DTensors are cut if any mesh dimension
    splits them along dimension 0, into equal ones.

    Args:
        arguments: ``(args, kwargs)``, on this rank.
        mesh: the graph's ranks, seen from one of them.
        grid: the same as a nested list of ranks.
        config: the graph's options.
        micro_batches: number of micro-batches.
        meta: the device that tensors on the meta device stand for.

    Raises:
        InputError: an argument is neither tensor nor constant, requires a gradient, cannot be cut into micro-batches,
            or is global or replicated and has a dimension that is marked as dynamic.
        PlacementError: a DTensor is on other ranks than the graph's, or split unevenly.
    """
    plain = batch_on(config, mesh)
    leaves, tree = pytree.tree_flatten_with_path(arguments)
    named = [(_name(path), leaf) for path, leaf in leaves]
    constants = [(f"input {name}", f"{type(leaf).__name__} {leaf!r}") for name, leaf in named if _is_constant(leaf)]
    inputs = [(name, leaf) for name, leaf in named if not _is_constant(leaf)]
    parts = tuple(is_part(leaf) for _, leaf in inputs)
    # An update of accumulated gradients has no inputs, or numbers only.
    has_sequence = config.mesh.context_parallel > 1 and any(parts)
    length = sequence_length(inputs, config.mesh.context_parallel) if has_sequence else None
    read = [_read(leaf, name, mesh, grid, plain, length) for name, leaf in inputs]
    cut = tuple(
        is_part or (is_dtensor(leaf) and tensor.dim() > 0 and Split(0) in sbp)
        for is_part, (_, leaf), (tensor, _, sbp) in zip(parts, inputs, read, strict=True)
    )
    meshes = [leaf.device_mesh for _, leaf in inputs if is_dtensor(leaf)]
    cut_by = (
        f"config.gradient_accumulation_steps = {micro_batches}"
        if config.virtual_ranks is None
        else f"config.virtual_ranks = {config.virtual_ranks} ({micro_batches} on each rank)"
    )
    are_split = any(
        is_dtensor(leaf) and any(isinstance(one, Split) for one in sbp)
        for (_, leaf), (_, _, sbp) in zip(inputs, read, strict=True)
    )
    if config.virtual_ranks is not None and config.virtual_ranks % mesh.size and are_split:
        raise InputError(
            f"inputs are split global tensors, but {mesh.size} ranks do not divide config.virtual_ranks = "
            f"{config.virtual_ranks}\nPass the rows of each rank's slices as a plain tensor, or use a number of ranks "
            "that divides it."
        )
    batch = Batch(
        tuple(local for local, _, _ in read),
        tuple(
            replace(spec, device=meta) if meta is not None and spec.device.type == "meta" else spec
            for _, spec, _ in read
        ),
        tuple(sbp for _, _, sbp in read),
        tree,
        tuple(leaf if _is_constant(leaf) else Tensor for _, leaf in named),
        tuple(name for name, _ in inputs),
        tuple(constants),
        meshes[0] if meshes else None,
        cut,
        tuple(not is_dtensor(leaf) for _, leaf in inputs),
        parts,
        micro_batches,
        cut_by,
        config.virtual_ranks,
        tuple(_marks(leaf, name) for name, leaf in inputs),
        passed=() if length is None else tuple(leaf for _, leaf in inputs),
    )
    # With slices, what is whole on all ranks is computed whole.
    _check_micro_batches(batch, must_cut=config.virtual_ranks is None)
    return batch


def is_part(leaf: Any) -> bool:
    """Return whether an input is a plain tensor of which each rank has a part."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and not is_dtensor(leaf) and not is_replicated(leaf)


def _marks(leaf: Tensor, name: str) -> Marks:
    marks = marks_of(leaf)
    if marks and (is_dtensor(leaf) or is_replicated(leaf)):
        kind = "a global tensor" if is_dtensor(leaf) else "replicated"
        raise InputError(
            f"{name} is {kind}, and dimension {marks[0][0]} of it is marked as dynamic, as only dimensions of plain "
            "inputs can be that are split with the batch\nRemove the mark (each size of it then compiles a step of its "
            "own), or pass this rank's rows as a plain tensor."
        )
    return marks


def _without_rows(tensor: Tensor, shape: Sequence[int | Dim], sizes: Mapping[str, tuple[int, ...]]) -> Tensor:
    others = [sum(sizes[size.name]) if isinstance(size, Dim) else size for size in shape[1:]]
    return tensor.new_empty((0, *others))


def collect_leaves(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves of ``value`` to ``leaves``, and return their nesting in a form that can be compared.

    Returns:
        The nesting; None if a container is of a type that only ``torch.utils._pytree`` flattens.
    """
    kind = type(value)
    if kind is dict:
        children, keys = value.values(), tuple(value)
    elif kind is tuple or kind is list:
        children, keys = value, ()
    elif kind is Tensor or kind in _CONSTANTS:
        leaves.append(value)
        return _LEAF
    else:
        return None
    nestings = tuple([collect_leaves(child, leaves) for child in children])
    return None if None in nestings else (kind, keys, nestings)


_LEAF = "leaf"


def _is_constant(leaf: Any) -> bool:
    # An instance of a subclass may hold more than its repr() shows.
    return type(leaf) in _CONSTANTS


def _check_micro_batches(batch: Batch, *, must_cut: bool) -> None:
    micro_batches, option = batch.micro_batches, batch.cut_by
    if micro_batches == 1:
        return
    if must_cut and not any(batch.cut):
        raise InputError(f"{option} cuts the batch along dimension 0, but no input is split along it: pass one that is")
    for tensor, name, is_cut, is_plain in zip(batch.tensors, batch.names, batch.cut, batch.plain, strict=True):
        if is_cut and not is_plain and (len(tensor) % micro_batches or not len(tensor)):
            raise InputError(
                f"{name} has {len(tensor)} samples on this rank, which {option} does not divide\n"
                "Global tensors are cut into equal micro-batches: pass a multiple of it on every rank, choose a number "
                "of micro-batches that divides the samples, or pass each rank's part as a plain tensor, of any size."
            )


def _shortened(value: object) -> str:
    """Return how a value is printed, on one short line; of an array its shape."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__module__}.{type(value).__name__} of shape {shape}"
    return f"{value!r:.60}"


def _read(
    leaf: Any, name: str, mesh: Mesh, grid: Any, plain: NdSbp, length: int | None
) -> tuple[Tensor, TensorSpec, NdSbp]:
    if type(leaf).__name__ == "BlockMask":
        raise InputError(
            f"{name} is a BlockMask, which has tensors of this rank and a function of the whole batch's rows\n"
            "Pass what the function reads, such as the number of each position's document [rows, length], and call "
            "create_block_mask() inside build()."
        )
    if not isinstance(leaf, Tensor):
        raise InputError(
            f"{name} is {_shortened(leaf)}, not a tensor\n"
            "A graph takes tensors, numbers, strings and None, in lists, tuples and dicts. Convert it to a tensor "
            "(torch.tensor(...)), or, if it never changes, make it an attribute of the graph."
        )
    if leaf.is_nested:
        raise InputError(
            f"{name} is a nested tensor, whose rows have lengths of their own\n"
            "Pad the rows to one length (torch.nested.to_padded_tensor) and pass their lengths too, or pack them into "
            "rows of one length, with a tensor that numbers the documents of each row."
        )
    if leaf.requires_grad:
        raise InputError(f"{name} requires a gradient, which a graph does not return: pass {name}.detach()")
    if is_dtensor(leaf):
        return _read_global(leaf, name, mesh, grid)
    if leaf.layout is not torch.strided:
        raise InputError(f"{name} has the layout {leaf.layout}: pass a dense tensor ({name}.to_dense())")
    if not is_part(leaf):
        return leaf.contiguous(), TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.device), all_broadcast(mesh.dims)
    sbp = tuple(broadcast if isinstance(entry, Split) and entry.dim >= leaf.dim() else entry for entry in plain)
    if length is not None and is_sequence(leaf, length):
        leaf = leaf.chunk(mesh.shape[-1], 1)[mesh.position[-1]]
    elif length is not None:
        sbp = (*sbp[:-1], broadcast)
    return leaf.contiguous(), TensorSpec(global_shape(leaf.shape, sbp, mesh), leaf.dtype, leaf.device), sbp


def _read_global(leaf: DTensor, name: str, mesh: Mesh, grid: Any) -> tuple[Tensor, TensorSpec, NdSbp]:
    device_mesh = leaf.device_mesh
    if device_mesh.mesh.tolist() != grid:
        raise PlacementError(
            f"{name} is placed on the ranks {device_mesh.mesh.tolist()}, the graph runs on {grid}\n"
            f"Redistribute it to zg.placement({device_mesh.device_type!r}, ranks={grid}), or set config.mesh.placement."
        )
    sbp = from_dtensor(leaf.placements)
    for dim in {entry.dim for entry in sbp if isinstance(entry, Split)}:
        parts = piece_count(tuple(entry if entry == Split(dim) else broadcast for entry in sbp), mesh)
        if leaf.shape[dim] % parts:
            raise PlacementError(
                f"{name} of shape {tuple(leaf.shape)} is {show(sbp)}: {leaf.shape[dim]} does not divide by {parts}"
            )
    local = leaf.to_local().contiguous()
    return local, TensorSpec(tuple(leaf.shape), leaf.dtype, local.device), sbp


def _name(path: Sequence[Any]) -> str:
    """Return ``args[0]['ids']``, or just ``ids`` for the keyword argument of that name."""
    outer, first, *rest = path
    start = f"args[{first.idx}]" if outer.idx == 0 else str(first.key)
    return start + pytree.keystr(tuple(rest))


def arrange_outputs(
    values: Sequence[Tensor],
    sbps: Sequence[NdSbp],
    shapes: Sequence[tuple[int, ...]],
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    mesh: DeviceMesh | None,
    grid: Any,
) -> Any:
    """Return the step's outputs in the nesting that ``build()`` returned.

    Args:
        values: this rank's part of each output tensor.
        sbps: placement of each.
        shapes: global shape of each.
        leaves: the constants that ``build()`` returned, and the class ``Tensor`` in place of each tensor.
        tree: the nesting of ``leaves``.
        mesh: device mesh of the batch: outputs of one dimension or more become DTensors on it. None: all stay plain.
        grid: the graph's ranks as a nested list; :func:`layout_of` returns it for plain outputs.
    """
    tensors = [
        _as_global(value, sbp, shape, mesh) if mesh is not None and shape else _with_layout(value, (sbp, grid))
        for value, sbp, shape in zip(values, sbps, shapes, strict=True)
    ]
    return _arranged(tensors, leaves, tree)


def _with_layout(value: Tensor, layout: Layout) -> Tensor:
    setattr(value, _LAYOUT, layout)
    return value


def layout_of(x: Tensor) -> Layout | None:
    """Return the layout of a plain output of a graph; None for any other tensor."""
    layout: Layout | None = getattr(x, _LAYOUT, None)
    return layout


def _arranged(tensors: Sequence[Tensor], leaves: Sequence[Any], tree: pytree.TreeSpec) -> Any:
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if leaf is Tensor else leaf for leaf in leaves], tree)


def _as_global(value: Tensor, sbp: NdSbp, shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value.contiguous(), mesh, to_dtensor(sbp), run_check=False, shape=torch.Size(shape), stride=stride
    )
