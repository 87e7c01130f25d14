"""Which parameters lie in which buckets: stores are kept where the step can use them, the rest is laid anew."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.capture.captured import Captured
from zerograph.compiler.members import Members
from zerograph.config import Config
from zerograph.errors import CaptureError
from zerograph.ir.annotate import annotated_sbp
from zerograph.ir.buckets import Bucket, Parameter, ShardStorage, Slot, plan_buckets, split_dim, state_layout
from zerograph.ir.gradient_edits import edited_gradients
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import role
from zerograph.ir.offload import offload_device
from zerograph.ir.precision import compute_copies
from zerograph.ir.sbp import broadcast, show
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import StateSpec, UpdateProgram
from zerograph.runtime.state import Store, store_of


@dataclass(frozen=True, eq=False)
class Update:
    """How a parameter is updated: by which program, of which optimizer's group, and that group's name in the graph."""

    program: UpdateProgram
    group_name: str
    group: Mapping[str, Any]
    optimizer: torch.optim.Optimizer

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name in the graph."""
        return self.group_name.partition(".")[0]

    def numbers(self) -> dict[str, str]:
        """Name of each hyperparameter's input in the graph, by its name in the program."""
        return {number: f"{self.group_name}.{number}" for number in self.program.numbers}

    def key(self) -> Hashable:
        """Equal for parameters that one bucket can update: updated one by one, each has a program of its own."""
        program = self.program
        return (
            self.group_name,
            tuple(program.numbers),
            (program.key if program.mixes is None else tuple(program.state.items())),
        )


@dataclass(frozen=True, eq=False)
class Planned:
    """A bucket of the step: the store behind it, or how to settle one (``store`` is None).

    ``updates`` has one for each slot, or is empty. ``specs`` is the optimizer state that ``keeper`` has for its
    parameters, ``layouts`` how that lies; ``fresh`` if there is none yet.
    """

    bucket: Bucket
    store: Store | None
    updates: tuple[Update, ...]
    specs: Mapping[str, StateSpec]
    layouts: Mapping[str, Bucket]
    keeper: torch.optim.Optimizer | None
    fresh: bool

    @property
    def first_differs(self) -> bool:
        return any(update.program.first is not None for update in self.updates)


def plan_layout(
    mesh: Mesh,
    zero_dim: int,
    members: Members,
    config: Config,
    captured: Captured,
    updates: Mapping[str, Update],
    *,
    train: bool,
) -> tuple[Planned, ...]:
    """The step's buckets in order of first use. Touches no state.

    Args:
        zero_dim: the mesh dimension that ZeRO splits along.
        updates: by parameter name, for those that the step updates.
        train: lay parameters that live in no store into buckets; a forward graph leaves them whole and plain.

    Raises:
        CaptureError: an optimizer holds state that its own update does not know.
    """
    order = _first_uses(captured, members)
    edits = {name: one.key for name, one in edited_gradients(captured.graph.graph).items() if name in updates}
    copies = dict.fromkeys(compute_copies(captured.graph.graph, config.amp_dtype), config.amp_dtype)
    kept: list[Planned] = []
    loose: list[str] = []
    for store, names in _by_store(members, order).items():
        if store is None:
            loose += names if train else []
        elif store.is_provisional and train:
            loose += names
        elif _usable(store, names, members, config, updates, mesh, zero_dim) and _alike(
            names, edits, copies, train=train
        ):
            store.job.check_alive()
            dtype = copies.get(names[0]) if len({copies.get(name) for name in names}) == 1 else None
            layout = replace(store.layout, slots=_named_here(store, members), compute_dtype=dtype)
            found = _updates(layout, updates)
            kept.append(Planned(layout, store, found, store.specs, store.layouts, store.optimizer, store.fresh))
        else:
            loose += names
    loose.sort(key=order.__getitem__)
    planned = [*kept, *_new(mesh, zero_dim, members, config, updates, edits, copies, loose)]
    planned.sort(key=lambda one: min(order.get(slot.name, len(order)) for slot in one.bucket.slots))
    return tuple(replace(one, bucket=replace(one.bucket, name=f"bucket{number}")) for number, one in enumerate(planned))


def _alike(
    names: Sequence[str], edits: Mapping[str, Hashable], copies: Mapping[str, torch.dtype | None], *, train: bool
) -> bool:
    """Whether one bucket may hold them as the step computes with them. A forward graph takes what training laid."""
    found = {(edits.get(name), copies.get(name) if train else None) for name in names}
    return len(found) == 1


def _first_uses(captured: Captured, members: Members) -> dict[str, int]:
    """Rank of every parameter by its first use in the step; unused ones come last."""
    position = {node: index for index, node in enumerate(captured.graph.graph.nodes)}
    last = len(position)
    used = {}
    for node in placeholders(captured.graph.graph, "parameter"):
        found = role(node)
        assert found is not None
        used[found.name] = min((position[user] for user in node.users), default=last)
    return {name: rank for rank, name in enumerate(sorted(members.parameters, key=lambda n: used.get(n, last)))}


def _by_store(members: Members, order: Mapping[str, int]) -> dict[Store | None, list[str]]:
    found: dict[Store | None, list[str]] = {}
    for name in order:
        found.setdefault(store_of(members.parameters[name]), []).append(name)
    return found


def _usable(
    store: Store,
    names: Sequence[str],
    members: Members,
    config: Config,
    updates: Mapping[str, Update],
    mesh: Mesh,
    zero_dim: int,
) -> bool:
    """Whether the step can run on the store as it is: its optimizer's, updated all in the same way; or not updated."""
    found = [updates.get(name) for name in names]
    first = found[0]
    if first is None:
        return not any(found)
    complete = len(names) == len(store.parameters)
    alike = all(one is not None and one.key() == first.key() for one in found)
    whole = {stays_whole(members.parameters[name], config) for name in names}
    fits = (
        complete
        and alike
        and store.job.mesh == mesh
        and store.layout.zero_dim == zero_dim
        and len(whole) == 1
        and (store.layout.by_user or whole == {store.layout.sbp == store.layout.gathered})
        and store.layout.storage.device == _rest(store.layout, config).device
        and _has_entries(store, first.program.state)
        and store.optimizer is first.optimizer
    )
    if not fits:
        return False
    named = members.names()
    one_by_one = first.program.mixes is not None
    shapes = [
        {**(_shapes_in(store, parameter) if one_by_one else {}), **updates[named[id(parameter)]].program.shapes}
        for parameter in store.parameters
    ]
    dealt = _deals(store.layout.slots[0], config, one_by_one=one_by_one, by_user=store.layout.by_user)
    alike = (store.layout.dealt, store.layout.one_by_one) == (dealt, one_by_one)
    return alike and store.layouts == _layouts(store.layout, store.specs, shapes)


def _has_entries(store: Store, state: Mapping[str, StateSpec]) -> bool:
    """Return whether the store has the state of an update.

    Further entries are kept for another update of the same optimizer, but only once they have values: the first step
    on a fresh store would make values of all of them.
    """
    return store.specs == state or (not store.fresh and store.specs.items() >= state.items())


def stays_whole(parameter: nn.Parameter | Slot, config: Config) -> bool:
    """Whether ZeRO leaves the parameter as the user placed it between steps, or whole."""
    numel = torch.Size(parameter.shape).numel()
    return not config.policy.split or numel < config.shard_min_size


def _deals(parameter: nn.Parameter | Slot, config: Config, *, one_by_one: bool, by_user: bool) -> bool:
    """Whether the parameter goes to one rank as a whole."""
    return one_by_one or (config.policy.deals and not by_user and not stays_whole(parameter, config))


def _stays_together(store: Store, *, dealt: bool) -> bool:
    """Whether what lies in the store is only taken apart, not laid with others: unless it was laid in another way."""
    return not store.is_provisional and store.layout.dealt == dealt


def _named_here(store: Store, members: Members) -> tuple[Any, ...]:
    """The store's slots under this graph's names; a parameter that the graph lacks keeps its old one."""
    names = members.names()
    return tuple(replace(slot, name=names.get(id(p), f"elsewhere.{slot.name}")) for p, slot in store.slots())


def _new(
    mesh: Mesh,
    zero_dim: int,
    members: Members,
    config: Config,
    updates: Mapping[str, Update],
    edits: Mapping[str, Hashable],
    copies: Mapping[str, torch.dtype | None],
    names: Sequence[str],
) -> list[Planned]:
    tied = set(members.aliases.values())
    parameters, holdings = [], {}
    for name in names:
        parameter, update = members.parameters[name], updates.get(name)
        holdings[name] = holding = _holding(parameter, update)
        sbp = annotated_sbp(name, parameter, mesh)
        by_user = sbp[zero_dim] != broadcast
        dealt = _deals(parameter, config, one_by_one=holding.one_by_one, by_user=by_user)
        key: Hashable = (
            None if update is None else update.key(),
            holding.key(),
            # One edit, and one part in each norm, for the whole bucket.
            edits.get(name),
            # Two graphs that want different buckets of the same parameters settle on what suits both.
            store.serial if (store := store_of(parameter)) and _stays_together(store, dealt=dealt) else None,
            # A tied weight is used at both ends of the model: alone, its bucket is not gathered in between. Dealt out
            # by itself, it would take as much memory on every rank as on its owner's.
            name if name in tied and not config.policy.deals else None,
        )
        if holding.one_by_one and split_dim(sbp) is not None:
            raise CaptureError(
                f"{name} is split {show(sbp)}, but its update needs it whole"
                f"{'' if update is None else f': {update.program.optimizer}, {update.program.mixes}'}\n"
                "Leave it whole, or give it to an elementwise optimizer (SGD, Adam, AdamW, ...)."
            )
        spec = (tuple(parameter.shape), parameter.dtype, members.device(parameter))
        parameters.append(Parameter(name, *spec, key, sbp, dealt, holding.one_by_one, copies.get(name)))
    buckets = plan_buckets(
        parameters,
        mesh=mesh,
        zero_dim=zero_dim,
        split=config.policy.split,
        min_split_numel=config.shard_min_size,
        bucket_bytes=config.bucket_size,
    )
    buckets = tuple(replace(bucket, storage=_rest(bucket, config)) for bucket in buckets)
    return [_planned(bucket, updates, [holdings[slot.name] for slot in bucket.slots]) for bucket in buckets]


def _rest(bucket: Bucket, config: Config) -> ShardStorage:
    """In whose memory the bucket rests; which files it may rest in is for ``residence`` to say."""
    option = config.optimizer_offload
    device = offload_device(option, bucket.device, whole=any(stays_whole(slot, config) for slot in bucket.slots))
    return ShardStorage(device, option is None or option.pin_memory)


def _planned(bucket: Bucket, updates: Mapping[str, Update], holdings: Sequence[_Holding]) -> Planned:
    first = holdings[0]
    layouts = _layouts(bucket, first.specs, [holding.shapes for holding in holdings])
    return Planned(bucket, None, _updates(bucket, updates), first.specs, layouts, first.keeper, first.fresh)


def _updates(bucket: Bucket, updates: Mapping[str, Update]) -> tuple[Update, ...]:
    return tuple(updates[slot.name] for slot in bucket.slots if slot.name in updates)


def _layouts(
    bucket: Bucket, specs: Mapping[str, StateSpec], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, Bucket]:
    """Where the state of the bucket's slots lies; 0-d entries are one for all slots, unless these go one by one."""
    return {
        name: state_layout(
            bucket,
            name,
            [_state_shape(slot.shape, one[name]) for slot, one in zip(bucket.slots, shapes, strict=True)]
            if bucket.one_by_one
            else (),
            spec.dtype,
            torch.device("cpu") if spec.scalar else bucket.device,
        )
        for name, spec in specs.items()
        if bucket.one_by_one or not spec.scalar
    }


def _state_shape(parameter: tuple[int, ...], state: tuple[int, ...]) -> tuple[int, ...]:
    """Updates of 0-d parameters are traced for one element."""
    return () if not parameter and state == (1,) else state


@dataclass(frozen=True)
class _Holding:
    """The optimizer state that a parameter has now, wherever it lies, and what it is to be in a bucket.

    ``shapes`` are those of its entries; asked for only where it is updated ``one_by_one``.
    """

    keeper: Any
    specs: Mapping[str, StateSpec]
    shapes: Mapping[str, tuple[int, ...]]
    one_by_one: bool
    scalars: tuple[tuple[str, float], ...]
    fresh: bool

    def key(self) -> Hashable:
        """Parameters share a bucket only if their step counts are equal too; equal on all ranks."""
        return self.fresh, tuple(self.specs), self.scalars


def _holding(parameter: nn.Parameter, update: Update | None) -> _Holding:
    store = store_of(parameter)
    keeper = update.optimizer if update is not None else store.optimizer if store is not None else None
    # Another optimizer's state is none of this one's.
    own = store is not None and not store.is_provisional and store.optimizer is keeper
    held: Mapping[str, Any]
    if store is not None and own:
        held = {} if store.fresh else {name: store.state[name] for name in store.specs}
    else:
        held = {} if keeper is None else held_state(keeper, parameter)
    if update is None:
        specs = {} if store is None else store.specs
        alone = store is not None and store.layout.one_by_one
        shapes = _shapes_in(store, parameter) if store is not None and alone else {}
        return _Holding(keeper, specs, shapes, alone, () if alone else _scalars(held, specs), not held)
    program, alone = update.program, update.program.mixes is not None
    if held and not set(program.state) <= set(held):
        raise CaptureError(
            f"{type(keeper).__name__} holds {', '.join(held)} for a parameter of shape {tuple(parameter.shape)}, but "
            f"its update needs {', '.join(program.state)}\n"
            "Load a state that belongs to these hyperparameters, or none."
        )
    # What another update of this optimizer left stays, as in plain PyTorch: momentum, while it is set to 0.
    kept = _specs_of(store if own else None, {name: one for name, one in held.items() if name not in program.state})
    specs = {**program.state, **kept}
    kept_shapes = {name: _kept_shape(store if own else None, parameter, name, held) for name in kept}
    if alone:
        return _Holding(keeper, specs, {**program.shapes, **kept_shapes}, alone, (), not held)
    if store is not None and own and store.layout.one_by_one and held and any(one.scalar for one in specs.values()):
        raise CaptureError(
            f"the update of {type(keeper).__name__} has become elementwise, but each parameter has step counts of its "
            "own\nBuild the graph anew with these hyperparameters, and load_state_dict() what state_dict() of this one "
            "returns."
        )
    for name, shape in kept_shapes.items():
        if not kept[name].scalar and shape != tuple(parameter.shape):
            raise CaptureError(
                f"{type(keeper).__name__} holds {name} of shape {shape} for a parameter of shape "
                f"{tuple(parameter.shape)}; its update with these hyperparameters does not use it, and is elementwise: "
                "state of other shapes cannot be kept beside it\n"
                "Load a state that belongs to these hyperparameters, or none."
            )
    return _Holding(keeper, specs, {}, alone, _scalars(held, specs), not held)


def _specs_of(store: Store | None, held: Mapping[str, Any]) -> dict[str, StateSpec]:
    """Return the specs of state that lies in a store, or with a plain optimizer (None)."""
    if store is not None:
        return {name: store.specs[name] for name in held}
    return {
        name: StateSpec(not value.dim(), value.dtype, None, value.dtype)
        for name, value in held.items()
        if isinstance(value, Tensor)
    }


def _kept_shape(store: Store | None, parameter: nn.Parameter, name: str, held: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of an entry of a parameter's state, in a store or with a plain optimizer (None)."""
    if store is None:
        return tuple(held[name].shape)
    if store.layout.one_by_one:
        return _shapes_in(store, parameter)[name]
    return () if store.specs[name].scalar else tuple(parameter.shape)


def _shapes_in(store: Store, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
    index = next(index for index, one in enumerate(store.parameters) if one is parameter)
    return {name: layout.slots[index].shape for name, layout in store.layouts.items()}


def _scalars(held: Mapping[str, Any], specs: Mapping[str, StateSpec]) -> tuple[tuple[str, float], ...]:
    return tuple((name, float(held[name])) for name, spec in specs.items() if spec.scalar and name in held)


def held_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state that a plain optimizer has for a parameter; entries without a value left out."""
    return {name: value for name, value in optimizer.state.get(parameter, {}).items() if value is not None}
