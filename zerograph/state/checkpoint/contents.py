"""What of a graph's state this rank has, tensor by tensor, under the names that a checkpoint gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph.compiler.members import Members, Optimizers, parameters_of
from zerograph.errors import ConfigError
from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.mesh import Mesh, local_part
from zerograph.ir.sbp import Split
from zerograph.runtime.checkpoint.pieces import Pieces, Within
from zerograph.runtime.offload.files import Extent
from zerograph.runtime.offload.transfers import read_to_overwrite, write
from zerograph.runtime.state import Store, TensorOrExtent, in_memory, store_of

Flat = Callable[[], Tensor]


@dataclass(frozen=True)
class Named:
    """Names in a checkpoint.

    Attributes:
        parameters: of each parameter, by ``id``.
        states: where the optimizer's state of a parameter begins, by ``id``: ``"optimizers.0.state.12."``.
        keepers: the optimizers whose state goes by these names.
    """

    parameters: Mapping[int, str]
    states: Mapping[int, str]
    keepers: Optimizers


def names_of(members: Members, optimizers: Optimizers) -> Named:
    """``modules.model.0.weight``, and ``optimizers.0.state.12.exp_avg`` as the plain optimizer numbers it."""
    states = {
        id(parameter): f"optimizers.{number}.state.{index}."
        for number, optimizer in enumerate(optimizers)
        for index, parameter in enumerate(parameters_of(optimizer))
    }
    return Named({key: f"modules.{name}" for key, name in members.names().items()}, states, optimizers)


def pieces_of_store(store: Store, named: Named) -> dict[str, Pieces]:
    """The tensors of a store: parameters, and the optimizer's state unless there is none yet, or it is another graph's.

    If several ranks have the same tensor, one of them writes it; ranks alternate.
    """
    read = _Last()
    found: dict[str, Pieces] = {}
    mesh = store.job.mesh
    parameters = [named.parameters.get(id(one)) for one in store.parameters]
    _lay(found, store.layout, parameters, store.layout.dtype, read.of(store.flat), mesh)
    if store.fresh or store.optimizer not in named.keepers:
        return found
    for name, spec in store.specs.items():
        held = store.state[name]
        entries = [None if (at := named.states.get(id(one))) is None else at + name for one in store.parameters]
        layout = store.layouts.get(name)
        if layout is not None:
            _lay(found, layout, entries, spec.plain_dtype, read.of(held), mesh)
            continue
        for number, entry in enumerate(entries):
            if entry is not None:
                found[entry] = one = Pieces((), spec.plain_dtype)
                if number % mesh.size == store.job.rank:
                    one.add(0, 1, read.of(held), 0)
    return found


def pieces_of_plain(tensors: Iterable[tuple[str, Tensor]], rank: int, ranks: int) -> dict[str, Pieces]:
    """Tensors that every rank has whole: ranks alternate in writing them."""
    found = {}
    for number, (name, tensor) in enumerate(tensors):
        found[name] = one = Pieces(tuple(tensor.shape), tensor.dtype)
        if number % ranks == rank:
            one.parts[(0,) * tensor.dim()] = (tuple(tensor.shape), _flat(tensor.contiguous()), 0)
    return found


def plain_tensors(members: Members, optimizers: Optimizers, named: Named) -> dict[str, Tensor]:
    """What lives in no store: buffers that the module saves, parameters, and state that an optimizer holds itself.

    Raises:
        ConfigError: state of an optimizer that is no tensor.
    """
    skipped = unsaved_buffers(members)
    found = {f"modules.{name}": buffer for name, buffer in members.buffers.items() if name not in skipped}
    for name, parameter in members.parameters.items():
        if store_of(parameter) is None:
            found[f"modules.{name}"] = parameter.detach()
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            for name, value in optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise ConfigError(
                        f"{type(optimizer).__name__} keeps {name!r} = {value!r:.40}: a checkpoint holds tensors"
                    )
                # What it made for a global tensor is one too.
                found[named.states[id(parameter)] + name] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def unsaved_buffers(members: Members) -> set[str]:
    """Names of buffers that were registered with ``persistent=False``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in members.root.named_modules()
        for name in module._non_persistent_buffers_set
    }


def in_place(
    store: Store, named: Named, *, states: bool, read: bool = True
) -> tuple[dict[str, Pieces], Callable[[], None]]:
    """All that this rank has of a store, to be written into, and what to call when that is done.

    What rests in files is read into memory first and written back then; not with ``read`` False, which is for those
    who only want to know what there is.
    """
    found: dict[str, Pieces] = {}
    copies: list[tuple[Extent, Tensor]] = []

    def flat(held: TensorOrExtent, names: Sequence[str | None]) -> Flat:
        if isinstance(held, Tensor):
            return _flat(held)
        if not read:
            return lambda: in_memory(held)
        copies.append((held, read_to_overwrite(held, whole=None not in names)))
        return _flat(copies[-1][1])

    mesh = store.job.mesh
    parameters = [named.parameters.get(id(one)) for one in store.parameters]
    _lay(found, store.layout, parameters, store.layout.dtype, flat(store.flat, parameters), mesh, every=True)
    for name, layout in store.layouts.items() if states else ():
        entries = [None if (at := named.states.get(id(one))) is None else at + name for one in store.parameters]
        _lay(found, layout, entries, layout.dtype, flat(store.state[name], entries), mesh, every=True)

    def finish() -> None:
        for extent, tensor in copies:
            write(extent, tensor)

    return found, finish


def _lay(
    found: dict[str, Pieces],
    layout: Bucket,
    names: Sequence[str | None],
    dtype: torch.dtype,
    flat: Flat,
    mesh: Mesh,
    *,
    every: bool = False,
) -> None:
    """Note this rank's part of each slot; ``every``: also of those that another rank writes."""
    *rows, own = local_part(layout.shape, layout.sbp, mesh)
    alike, mine = _replicas(layout, mesh)
    for number, (name, slot) in enumerate(zip(names, layout.slots, strict=True)):
        if name is None:
            continue
        found[name] = one = Pieces(slot.shape, dtype)
        if not every and number % alike != mine:
            continue
        low, high = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
        if not slot.numel and own.start == 0:
            one.parts[(0,) * len(slot.shape)] = (slot.shape, flat, 0)
        elif low < high:
            length = own.stop - own.start
            for at, within in enumerate(_rows(slot, layout.rows, rows)):
                start = at * length + low - own.start
                one.add(low - slot.offset, high - slot.offset, flat, start, within)


def _rows(slot: Slot, rows: int | None, local: Sequence[slice]) -> list[Within | None]:
    """The box of the parameter that each row of this rank's part is; one None where the bucket is flat."""
    if rows is None or slot.split is None:
        return [None]
    size = slot.shape[slot.split] // rows
    shape = tuple(size if dim == slot.split else length for dim, length in enumerate(slot.shape))
    return [
        Within(tuple(row * size if dim == slot.split else 0 for dim in range(len(shape))), shape)
        for row in range(local[0].start, local[0].stop)
    ]


def _replicas(layout: Bucket, mesh: Mesh) -> tuple[int, int]:
    """How many ranks hold the same as this one, and which of them it is."""
    alike, mine = 1, 0
    for one, ranks, position in zip(layout.sbp, mesh.shape, mesh.position, strict=True):
        if not isinstance(one, Split):
            mine = mine * ranks + position
            alike *= ranks
    return alike, mine


def _flat(tensor: Tensor) -> Flat:
    return lambda: tensor.detach().view(-1)


class _Last:
    """Reads what rests in files: the last one stays, as its boxes are asked for one after the other."""

    def __init__(self) -> None:
        self._held: TensorOrExtent | None = None
        self._tensor: Tensor | None = None

    def of(self, held: TensorOrExtent) -> Flat:
        def read() -> Tensor:
            if isinstance(held, Tensor):
                return held.detach().reshape(-1)
            if self._held is not held or self._tensor is None:
                self._held, self._tensor = held, in_memory(held).reshape(-1)
            return self._tensor

        return read
