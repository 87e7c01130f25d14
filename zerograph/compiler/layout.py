"""The layout of a step: its buckets of parameters, and where they are stored between steps.

Existing stores are kept where the step can use them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.capture.captured import Captured
from zerograph.compiler.members import Members
from zerograph.compiler.parameter_placement import is_placed_so, user_sbps
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError
from zerograph.ir.buckets import (
    Bucket,
    Folder,
    Parameter,
    ShardStorage,
    free_dims,
    layer_of,
    plan_buckets,
    state_layout,
)
from zerograph.ir.coded_state import coded_layout
from zerograph.ir.gradient_edits import edited_gradients
from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta
from zerograph.ir.offload import OffloadTo, offload_device
from zerograph.ir.precision import compute_copies
from zerograph.ir.sbp import broadcast, dims_split, show
from zerograph.ir.slots import Slot
from zerograph.ir.step_graph import placeholders, used_once
from zerograph.ir.update_program import StateSpec, UpdateProgram
from zerograph.runtime.offload.files import Extent, open_file, reserve
from zerograph.runtime.state import BucketState, Extents, Store, flat_state, own_state, store_of


@dataclass(frozen=True, eq=False)
class Update:
    """The update of a parameter.

    Attributes:
        program: the traced update.
        group_name: name of the optimizer's group in the graph: ``optimizer0.group0``.
        group: the group, as in ``optimizer.param_groups``.
        optimizer: the optimizer.
    """

    program: UpdateProgram
    group_name: str
    group: Mapping[str, Any]
    optimizer: torch.optim.Optimizer

    def numbers(self) -> dict[str, str]:
        """Return the name of each hyperparameter's input in the graph, by its name in the program."""
        return {number: f"{self.group_name}.{number}" for number in self.program.numbers}

    def key(self) -> Hashable:
        """Return a key that is equal for parameters that one bucket can update.

        Parameters that are updated one by one may have different programs.
        """
        program = self.program
        return (
            self.group_name,
            tuple(program.numbers),
            (program.key if program.mixes is None else tuple(program.state.items())),
        )


@dataclass(eq=False)
class PlannedBucket(BucketState):
    """A bucket of a step, before its store exists.

    Attributes:
        store: its store; None if one must be created.
        updates: the update of each slot; empty if the step does not update the bucket.
    """

    store: Store | None
    updates: tuple[Update, ...]

    @property
    def first_differs(self) -> bool:
        """True if the first update is computed in another way than later ones."""
        return any(update.program.first is not None for update in self.updates)


@dataclass(frozen=True, eq=False)
class Layouts:
    """Lays out the parameters of a step in buckets. Changes no state.

    Attributes:
        config: the graph's options.
        mesh: the ranks.
        zero_dims: the mesh dimensions along which ZeRO splits.
        members: the graph's modules and tensors.
        captured: the captured graph.
        updates: the update of each parameter that the step updates, by parameter name.
        trains: put parameters without store into buckets. A forward graph leaves them plain and whole.
    """

    config: Config
    mesh: Mesh
    zero_dims: tuple[int, ...]
    members: Members
    captured: Captured
    updates: Mapping[str, Update]
    trains: bool

    @functools.cached_property
    def _edits(self) -> Mapping[str, Hashable]:
        """Keys of the edits of gradients, by parameter name."""
        edits = edited_gradients(self.captured.graph.graph).items()
        return {name: edit.key for name, edit in edits if name in self.updates}

    @functools.cached_property
    def _copies(self) -> Mapping[str, torch.dtype | None]:
        """The dtypes of the copies that parameters are computed with, by parameter name."""
        return dict.fromkeys(
            compute_copies(self.captured.graph.graph, self.config.precision.amp_dtype), self.config.precision.amp_dtype
        )

    def plan(self) -> tuple[PlannedBucket, ...]:
        """Return the step's buckets with their storage, in order of first use.

        Raises:
            CaptureError: an optimizer has state that does not fit its update.
            ConfigError: the offload options do not fit the ZeRO stage or each other.
        """
        members, copies, order = self.members, self._copies, _first_uses(self.captured, self.members)
        names_by_store: dict[Store | None, list[str]] = {}
        for name in order:
            names_by_store.setdefault(store_of(members.parameters[name]), []).append(name)
        layout: list[PlannedBucket] = []
        loose: list[str] = []
        for store, names in names_by_store.items():
            if store is None:
                loose += names if self.trains else []
            elif store.is_provisional and self.trains:
                loose += names
            elif self._can_keep(store, names) and self._are_computed_alike(names):
                store.job.check_alive()
                dtype = copies.get(names[0]) if len({copies.get(name) for name in names}) == 1 else None
                bucket = replace(store.layout, slots=_renamed_slots(store, members), compute_dtype=dtype)
                store_state = store.specs, store.layouts, store.optimizer, store.fresh
                layout.append(PlannedBucket(bucket, *store_state, store, self._updates_of(bucket)))
            else:
                loose += names
        layout += self._new_buckets(sorted(loose, key=order.__getitem__))
        layout.sort(key=lambda planned: min(order.get(slot.name, len(order)) for slot in planned.layout.slots))
        named = [
            replace(planned, layout=replace(planned.layout, name=f"bucket{number}"))
            for number, planned in enumerate(layout)
        ]
        return _with_storage(named, self.config, self.mesh)

    def _are_computed_alike(self, names: Sequence[str]) -> bool:
        """Return True if one bucket may hold the parameters: equal edits of gradients and, in training, dtypes."""
        return len({(self._edits.get(name), self._copies.get(name) if self.trains else None) for name in names}) == 1

    def _can_keep(self, store: Store, names: Sequence[str]) -> bool:
        """Return True if the step can run on the store as it is.

        It can if it updates none of the store's parameters, or all of them by one update of the store's optimizer and
        in the layout that the configuration wants.
        """
        config, members = self.config, self.members
        parameter_updates = [self.updates.get(name) for name in names]
        first = parameter_updates[0]
        if first is None:
            return not any(parameter_updates)
        whole = {stays_whole(members.parameters[name], config) for name in names}
        fits = (
            len(names) == len(store.parameters)
            and all(update is not None and update.key() == first.key() for update in parameter_updates)
            and store.job.mesh == self.mesh
            and len(whole) == 1
            and store.layout.block % config.block == 0
            and (config.virtual_ranks is None or store.layout.is_in_norm_blocks)
            and (store.layout.by_user or whole == {store.layout.sbp == store.layout.gathered})
            and store.layout.storage.device == self._memory(store.layout).device
            and _has_entries(store, first.program.state)
            and store.optimizer is first.optimizer
        )
        if not fits or not is_placed_so(store.layout, self.zero_dims, names, members, self.mesh, config):
            return False
        parameter_names = members.names
        one_by_one = first.program.mixes is not None
        shapes = [
            {
                **_state_shapes(store, parameter),
                **self.updates[parameter_names[id(parameter)]].program.shapes,
            }
            for parameter in store.parameters
        ]
        has_owner = self._has_owner(store.layout.slots[0], one_by_one=one_by_one, by_user=store.layout.by_user)
        return (store.layout.has_owners, store.layout.one_by_one) == (has_owner, one_by_one) and (
            store.layouts == _state_layouts(store.layout, store.specs, shapes)
        )

    def _new_buckets(self, names: Sequence[str]) -> list[PlannedBucket]:
        """Return new buckets of the named parameters."""
        config, members, mesh = self.config, self.members, self.mesh
        sbps = user_sbps(names, members, mesh, config)
        tied = members.tied() - used_once(self.captured.graph.graph)
        parameters, states = [], {}
        for name in names:
            parameter, update, sbp = members.parameters[name], self.updates.get(name), sbps[name]
            states[name] = state = _parameter_state(parameter, update)
            by_user = any(sbp[dim] != broadcast for dim in free_dims(self.zero_dims, sbp))
            has_owner = self._has_owner(parameter, one_by_one=state.one_by_one, by_user=by_user)
            store = store_of(parameter)
            stays_together = store is not None and not store.is_provisional and store.layout.has_owners == has_owner
            key: Hashable = (
                None if update is None else update.key(),
                state.key(),
                # A bucket has one edit of its gradient, and one part in each norm.
                self._edits.get(name),
                # Two graphs that share parameters, but not buckets, get buckets that suit both.
                store.serial if store is not None and stays_together else None,
                # A tied weight is used at both ends of the model. In a bucket of its own it can be resharded in
                # between. Dealt out by itself, it would take as much memory on every rank as on its owner.
                name if name in tied and not config.policy.assigns_owners else None,
            )
            if state.one_by_one and dims_split([sbp]):
                raise CaptureError(
                    f"{name} is split {show(sbp)}, but its update needs it whole"
                    f"{'' if update is None else f': {update.program.optimizer}, {update.program.mixes}'}\n"
                    "Leave it whole, or use an elementwise optimizer for it (SGD, Adam, AdamW, ...)."
                )
            if dims_split([sbp]) and any(spec.codec is not None for spec in state.specs.values()):
                raise CaptureError(
                    f"config.precision.optimizer_state = 'int8', but {name} is split {show(sbp)}: its state cannot be "
                    "coded\nLeave the parameter whole, or the state exact."
                )
            spec = (tuple(parameter.shape), parameter.dtype, members.device(parameter))
            fused = update is not None and update.program.fused is not None
            layer = layer_of(name) if members.device(parameter).type != "cpu" else ""
            copy = self._copies.get(name)
            parameters.append(Parameter(name, *spec, key, sbp, has_owner, state.one_by_one, copy, fused, layer))
        buckets = plan_buckets(
            parameters,
            mesh=mesh,
            zero_dims=self.zero_dims,
            split=config.policy.split,
            min_split_numel=config.zero.shard_min_size,
            bucket_bytes=config.zero.bucket_size,
            block=config.block,
            in_norm_blocks=config.virtual_ranks is not None,
        )
        planned = []
        for bucket in buckets:
            bucket = replace(bucket, storage=self._memory(bucket))
            own = [states[slot.name] for slot in bucket.slots]
            layouts = _state_layouts(bucket, own[0].specs, [state.shapes for state in own])
            kept = own[0].specs, layouts, own[0].keeper, own[0].fresh
            planned.append(PlannedBucket(bucket, *kept, None, self._updates_of(bucket)))
        return planned

    def _has_owner(self, parameter: nn.Parameter | Slot, *, one_by_one: bool, by_user: bool) -> bool:
        """Return True if one rank owns the whole parameter."""
        assigns_owners = self.config.policy.assigns_owners and not by_user
        return one_by_one or (assigns_owners and not stays_whole(parameter, self.config))

    def _memory(self, bucket: Bucket) -> ShardStorage:
        """Return the device that stores the bucket; :func:`_with_storage` adds files."""
        option = self.config.memory.offload.optimizer
        whole = any(stays_whole(slot, self.config) for slot in bucket.slots)
        return ShardStorage(offload_device(option, bucket.device, whole=whole), option is None or option.pin_memory)

    def _updates_of(self, bucket: Bucket) -> tuple[Update, ...]:
        return tuple(self.updates[slot.name] for slot in bucket.slots if slot.name in self.updates)


def _first_uses(captured: Captured, members: Members) -> dict[str, int]:
    """Return the position of every parameter in the order of first use; unused parameters come last."""
    position = {node: index for index, node in enumerate(captured.graph.graph.nodes)}
    last = len(position)
    first_use = {}
    for node in placeholders(captured.graph.graph, "parameter"):
        first_use[meta(node)["role"].name] = min((position[user] for user in node.users), default=last)
    ordered = sorted(members.parameters, key=lambda name: first_use.get(name, last))
    return {name: number for number, name in enumerate(ordered)}


def _has_entries(store: Store, state: Mapping[str, StateSpec]) -> bool:
    """Return True if the store has the state of an update.

    It may have further entries, of another update of the same optimizer, if these have values. On a fresh store the
    first step would initialise all entries.
    """
    return store.specs == state or (not store.fresh and store.specs.items() >= state.items())


def stays_whole(parameter: nn.Parameter | Slot, config: Config) -> bool:
    """Return True if ZeRO does not split the parameter: it stays as the user placed it, or whole."""
    numel = torch.Size(parameter.shape).numel()
    return not config.policy.split or numel < config.zero.shard_min_size


def _renamed_slots(store: Store, members: Members) -> tuple[Any, ...]:
    """Return the store's slots under this graph's names. A parameter that the graph lacks keeps its old name."""
    names = members.names
    return tuple(replace(slot, name=names.get(id(p), f"elsewhere.{slot.name}")) for p, slot in store.slots())


def _state_layouts(
    bucket: Bucket, specs: Mapping[str, StateSpec], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, Bucket]:
    """Return the layout of each entry of the bucket's optimizer state.

    A scalar entry has one value for all slots, and no layout, unless the slots are updated one by one.

    Args:
        shapes: shapes of each slot's entries; used only if the slots are updated one by one.
    """
    return {
        name: coded_layout(
            state_layout(
                bucket,
                name,
                [_state_shape(slot.shape, entry[name]) for slot, entry in zip(bucket.slots, shapes, strict=True)]
                if bucket.one_by_one
                else (),
                spec.stored_dtype,
                torch.device("cpu") if spec.scalar else bucket.device,
            ),
            spec.codec,
        )
        for name, spec in specs.items()
        if bucket.one_by_one or not spec.scalar
    }


def _state_shape(parameter: tuple[int, ...], state: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an entry of a parameter's state. Updates of 0-d parameters are traced with shape (1,)."""
    return () if not parameter and state == (1,) else state


@dataclass(frozen=True)
class _ParameterState:
    """The optimizer state of a parameter, and the form that it takes in a bucket.

    Attributes:
        keeper: the optimizer that the state belongs to, or None.
        specs: the entries in the bucket.
        shapes: the shapes of the entries.
        one_by_one: the update needs whole parameters.
        scalars: the present values of scalar entries.
        fresh: there is no state yet.
    """

    keeper: Any
    specs: Mapping[str, StateSpec]
    shapes: Mapping[str, tuple[int, ...]]
    one_by_one: bool
    scalars: tuple[tuple[str, float], ...]
    fresh: bool

    def key(self) -> Hashable:
        """Return a key that is equal for parameters that may share a bucket: step counts must be equal too."""
        return self.fresh, tuple(self.specs), self.scalars


def _parameter_state(parameter: nn.Parameter, update: Update | None) -> _ParameterState:
    """Return the optimizer state of a parameter as a bucket with this update needs it.

    Raises:
        CaptureError: the present state does not fit the update.
    """
    store = store_of(parameter)
    keeper = update.optimizer if update is not None else store.optimizer if store is not None else None
    # State of another optimizer does not count.
    own = store if store is not None and store.optimizer is keeper else None
    values: Mapping[str, Any] = {} if keeper is None or own is not None else plain_state(keeper, parameter)
    if own is not None and not own.fresh:
        values = {name: own.state[name] for name in own.specs}
    specs, shapes = _specs_and_shapes(own, parameter, values)
    if update is None:
        one_by_one = store is not None and store.layout.one_by_one
    else:
        program = update.program
        if values and not set(program.state) <= set(values):
            raise CaptureError(
                f"{type(keeper).__name__} has {', '.join(values)} for a parameter of shape {tuple(parameter.shape)}, "
                f"but its update needs {', '.join(program.state)}\n"
                "Load a state that belongs to these hyperparameters, or none."
            )
        # Entries of another update of this optimizer stay, as in plain PyTorch: momentum, while it is set to 0.
        unused = [name for name in specs if name in values and name not in program.state]
        unused_shapes = {name: shapes[name] for name in unused}
        specs, shapes = {**program.state, **{name: specs[name] for name in unused}}, {**program.shapes, **unused_shapes}
        one_by_one = program.mixes is not None
        if not one_by_one:
            _check_elementwise(parameter, keeper, own, specs, unused_shapes, fresh=not values)
    scalars = [(name, float(values[name])) for name, spec in specs.items() if spec.scalar and name in values]
    return _ParameterState(keeper, specs, shapes, one_by_one, () if one_by_one else tuple(scalars), not values)


def _check_elementwise(
    parameter: nn.Parameter,
    keeper: Any,
    store: Store | None,
    specs: Mapping[str, StateSpec],
    unused_shapes: Mapping[str, tuple[int, ...]],
    *,
    fresh: bool,
) -> None:
    """Check that a parameter's state can lie in a bucket with an elementwise update.

    Args:
        keeper: the optimizer.
        store: the store that has the state; None if the optimizer has it.
        specs: the entries in the bucket.
        unused_shapes: shapes of the entries that the update does not use.
        fresh: there is no state yet.

    Raises:
        CaptureError: it cannot.
    """
    lasting = store is not None and not store.is_provisional and store.layout.one_by_one
    if lasting and not fresh and any(spec.scalar for spec in specs.values()):
        raise CaptureError(
            f"the update of {type(keeper).__name__} has become elementwise, but each parameter has step counts of its "
            "own\nBuild a new graph with these hyperparameters, and load this graph's state_dict() into it."
        )
    for name, shape in unused_shapes.items():
        if not specs[name].scalar and shape != tuple(parameter.shape):
            raise CaptureError(
                f"{type(keeper).__name__} has {name} of shape {shape} for a parameter of shape "
                f"{tuple(parameter.shape)}; its update with these hyperparameters does not use it, and is elementwise: "
                "state of other shapes cannot be kept beside it\n"
                "Load a state that belongs to these hyperparameters, or none."
            )


def _specs_and_shapes(
    store: Store | None, parameter: nn.Parameter, values: Mapping[str, Any]
) -> tuple[Mapping[str, StateSpec], Mapping[str, tuple[int, ...]]]:
    """Return spec and shape of each entry of a parameter's state: in a store, or of a plain optimizer's values."""
    if store is not None:
        return store.specs, _state_shapes(store, parameter)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    specs = {name: StateSpec(not one.dim(), one.dtype, None, one.dtype) for name, one in tensors.items()}
    return specs, {name: tuple(one.shape) for name, one in tensors.items()}


def _state_shapes(store: Store, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
    """Return the shape of each entry of a parameter's state in a store."""
    if not store.layout.one_by_one:
        return {name: () if spec.scalar else tuple(parameter.shape) for name, spec in store.specs.items()}
    index = next(index for index, other in enumerate(store.parameters) if other is parameter)
    return {name: store.layouts[name].slots[index].shape if name in store.layouts else () for name in store.specs}


def plain_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the flat state that a plain optimizer has for a parameter, without None and the rest of containers."""
    entries = flat_state(own_state(optimizer).get(parameter, {}))
    return {name: value for name, value in entries.items() if value is not None and not name.endswith("[]")}


def _with_storage(layout: Sequence[PlannedBucket], config: Config, mesh: Mesh) -> tuple[PlannedBucket, ...]:
    """Return the layout with the storage of each bucket that the step updates; other buckets keep theirs.

    :func:`keep_gather_buffers` assigns the gather buffers, once the graph is emitted.

    Raises:
        ConfigError: the offload options do not fit the ZeRO stage or each other.
    """
    _check_options(layout, config)
    # A bucket that is freed after its use has no gather buffer. A bucket that another graph updates is left as it is.
    reshards = config.policy.reshard_after_forward or config.memory.memory_budget is not None
    frees = any(planned.updates for planned in layout) and reshards
    bytes_left = 0 if config.memory.offload.parameters is None else config.memory.offload.parameters.max_in_cpu
    assigned = []
    for planned in layout:
        if planned.updates:
            bucket = planned.layout
            shard_bytes = math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * bucket.dtype.itemsize
            stays = bucket.is_whole or shard_bytes <= bytes_left
            parameters = None if stays else _folder(config.memory.offload.parameters)
            bytes_left -= 0 if bucket.is_whole or parameters is not None else shard_bytes
            # Whole buckets of an accelerator are updated there.
            state = _folder(config.memory.offload.optimizer) if bucket.storage_device.type == "cpu" else None
            planned = _stored(planned, parameters=parameters, state=state)
        if frees and (planned.updates or planned.optimizer is None):
            planned = _stored(planned, gather_buffer=False)
        assigned.append(planned)
    return tuple(assigned)


def keep_gather_buffers(layout: Sequence[PlannedBucket], graph: fx.Graph) -> tuple[PlannedBucket, ...]:
    """Return the layout with a gather buffer for each bucket that the emitted graph gathers into one."""
    names = {meta(node)["role"].bucket for node in placeholders(graph, "gather_buffer")}
    # A buffer that exists stays: two steps, of which one uses it, would free and allocate it in turn.
    return tuple(
        _stored(one, gather_buffer=one.layout.storage.gather_buffer or one.layout.name in names) for one in layout
    )


def _stored(planned: PlannedBucket, **changes: Any) -> PlannedBucket:
    """Return a bucket with a change of its storage."""
    return replace(planned, layout=replace(planned.layout, storage=replace(planned.layout.storage, **changes)))


def _check_options(layout: Sequence[PlannedBucket], config: Config) -> None:
    offload, policy = config.memory.offload, config.policy
    if offload.parameters is not None and not (policy.split and policy.reshard_after_forward):
        raise ConfigError(
            "config.memory.offload: parameters need ZeRO stage 3: below it they are gathered throughout the step\n"
            "Set config.zero.stage = 3, or choose zg.Offload without parameters."
        )
    if all(planned.layout.device.type == "cpu" for planned in layout if planned.updates):
        return
    if offload.parameters is not None and offload.optimizer is None:
        raise ConfigError(
            "config.memory.offload: parameters of an accelerator need the optimizer: shards are updated where they are "
            "stored\nGive zg.Offload(optimizer='cpu', parameters=...) or another place for it."
        )
    if offload.optimizer is not None and not policy.split:
        raise ConfigError(
            "config.memory.offload: the optimizer of a model on an accelerator needs ZeRO: only shards are offloaded\n"
            "Set config.zero.stage = 1, which works on a single rank too."
        )


def _folder(option: OffloadTo | None) -> Folder | None:
    return None if option is None else option.folder


def reserve_files(layout: Sequence[PlannedBucket], mesh: Mesh, rank: int) -> dict[str, Extents]:
    """Reserve space in this rank's files for all state that moves there.

    Space that is not used is freed when the result is deleted.

    Returns:
        The reserved extents: by bucket name, then by entry of the optimizer state; ``""`` for the parameters.

    Raises:
        OffloadError: the directory does not exist or cannot be written, or the disk is too full.
    """
    extents: dict[str, Extents] = {}
    for planned in layout:
        storage = planned.layout.storage
        before = ShardStorage() if planned.store is None else planned.store.layout.storage
        moved: dict[str, tuple[Bucket, Folder]] = {}
        if storage.parameters is not None and storage.parameters != before.parameters:
            moved[""] = planned.layout, storage.parameters
        if storage.state is not None and storage.state != before.state:
            moved |= {name: (entry, storage.state) for name, entry in planned.layouts.items()}
        extents[planned.layout.name] = _reserved(moved, mesh, rank)
    return extents


def _reserved(moved: Mapping[str, tuple[Bucket, Folder]], mesh: Mesh, rank: int) -> dict[str, Extent]:
    return {
        name: reserve(
            open_file(folder.path, rank, keep=folder.keep), local_shape(entry.shape, entry.sbp, mesh), entry.dtype
        )
        for name, (entry, folder) in moved.items()
    }
