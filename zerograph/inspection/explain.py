"""The life of one tensor through a step: stored, gathered, used, freed, its gradient made, reduced, and updated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import written_arguments
from zerograph.compiler.compiled import RewrittenStep
from zerograph.errors import ConfigError
from zerograph.inspection.life import Event, Life, TensorKind
from zerograph.inspection.names import close_to, is_wait, labels, within
from zerograph.inspection.spots import Spot, Spots
from zerograph.inspection.summary import rests
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.alias import is_view_or_copy
from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import Boxing, boxing_of, meta, origin, role
from zerograph.ir.offload_operators import FETCH, TRANSFER, WAIT_TRANSFER, WRITE_BACK
from zerograph.ir.sbp import NdSbp, Split, show

aten = torch.ops.aten


def explain(step: RewrittenStep, asked: str) -> Life:
    """The life of the tensor of that name; see :meth:`zerograph.inspection.step.Views.explain`."""
    name = step.aliases.get(asked, asked)
    finder = _Finder(step, asked)
    for bucket in step.context.buckets:
        for slot in bucket.slots:
            if slot.name == name:
                return finder.parameter(bucket, slot)
            entry = name.removeprefix(f"{slot.name}.")
            if name != entry and (node := finder.placeholder("state", f"{bucket.name}.{entry}")) is not None:
                return finder.state(bucket, slot, entry, node)
    for kind in ("parameter", "buffer", "bucket", "state", "hyperparameter"):
        if (node := finder.placeholder(kind, name)) is not None:
            return finder.given(node, kind)
    if (node := finder.placeholder("input", name.removeprefix("input"))) is not None:
        return finder.given(node, "input")
    return finder.computed(name)


class _Finder:
    """Looks one name up in the emitted graph and tells its life."""

    def __init__(self, step: RewrittenStep, asked: str) -> None:
        self.step, self.asked = step, asked
        self.graph = step.emitted
        self.spots = Spots(self.graph)

    def placeholder(self, kind: str, name: str) -> fx.Node | None:
        node: fx.Node
        for node in self.graph.find_nodes(op="placeholder"):
            if (found := role(node)) is not None and (found.kind, found.name) == (kind, name):
                return node
        return None

    # What is asked for.

    def parameter(self, bucket: Bucket, slot: Slot) -> Life:
        flat = self.placeholder("bucket", bucket.name)
        sbp = bucket.sbp_of(slot)
        events = [self._stored(bucket, slot), *self._state(bucket, slot)]
        if flat is not None:
            events += self._way_to_uses(flat, bucket, slot)
        events += self._gradient(bucket, slot)
        if flat is not None:
            events += self._updates(flat, bucket)
        local = slot.shape if isinstance(sbp[bucket.zero_dim], Split) and slot.split is None else None
        return Life(
            name=slot.name,
            asked=self.asked,
            kind="parameter",
            dtype=dtype_name(bucket.dtype),
            shape=slot.shape,
            local=local_shape(slot.shape, sbp, self.step.context.mesh) if local is None else local,
            sbp=show(sbp),
            bucket=bucket.name,
            bytes=self._share(bucket, slot),
            events=_in_order(events),
        )

    def state(self, bucket: Bucket, slot: Slot, entry: str, node: fx.Node) -> Life:
        update = self.step.context.updates[bucket.name]
        layout = update.layouts.get(entry)
        value: Tensor = node.meta["val"]
        if layout is None:
            shape, sbp = tuple(value.shape), meta(node)["sbp"]
            count, whose = value.numel() * value.element_size(), "one for the whole bucket"
        else:
            index = bucket.slots.index(slot)
            shape, sbp = layout.slots[index].shape, layout.sbp_of(layout.slots[index])
            count, whose = self._share(layout, layout.slots[index]), ""
        note = ", ".join(filter(None, (f"{bucket.name}.{entry} {show(sbp)}", whose, rests(bucket))))
        events = [Event("stored", bytes=count, note=note), *self._updates(node, bucket)]
        return Life(
            name=f"{slot.name}.{entry}",
            asked=self.asked,
            kind="optimizer state",
            dtype=dtype_name(value.dtype),
            shape=shape,
            local=shape,
            sbp=show(sbp),
            bucket=bucket.name,
            bytes=count,
            events=_in_order(events),
        )

    def given(self, node: fx.Node, kind: str) -> Life:
        """Anything else that the graph takes whole: inputs, buffers, buckets, parameters in no bucket."""
        kinds: dict[str, TensorKind] = {"input": "input", "buffer": "buffer", "parameter": "parameter"}
        made = Event("stored", bytes=self._bytes(node))
        if kind == "input":
            made = Event("given", phase="call", bytes=self._bytes(node))
        writes = [
            self._event("updated", user, note=operator_name(user))
            for user in self.spots.readers(node)
            if node in written_arguments(user)
        ]
        return self._life(node, kinds.get(kind, "optimizer state"), [made, *self._uses(node), *writes])

    def computed(self, name: str) -> Life:
        node = self._node(name)
        made = self._event("made", node, note=operator_name(node), count=self._bytes(node))
        return self._life(node, "value", [made, *self._uses(node)])

    def _node(self, name: str) -> fx.Node:
        """The node of that name, or what a module of that name yields."""
        names = {one: label for graph in self.spots.graphs for one, label in labels(graph).items()}
        own = name.rpartition(":")[2]
        for node, label in names.items():
            if node.op != "output" and name in (label, node.name):
                return node
        # A node that a pass has put another in the place of is still named so.
        for node in names:
            if ":" in name and node.name == own:
                return node
        yielded = self._yielded_by(name)
        if yielded is not None:
            return yielded
        raise ConfigError(f"the step has no tensor {name!r}{close_to(name, self._known(names.values()))}\n{_HELP}")

    def _known(self, names: Iterable[str]) -> list[str]:
        slots = [slot.name for bucket in self.step.context.buckets for slot in bucket.slots]
        modules = {origin(spot.node).module for spot in self.spots}
        return [*slots, *self.step.aliases, *modules, *names]

    def _yielded_by(self, module: str) -> fx.Node | None:
        """The last value of forward made in the module that something outside of it reads."""
        found = None
        for spot in self.spots:
            node = spot.node
            if node.op == "placeholder" or origin(node).phase != "forward" or not within(origin(node).module, module):
                continue
            outside = [one for one in node.users if one.op == "output" or not within(origin(one).module, module)]
            forward = [one for one in outside if one.op == "output" or origin(one).phase == "forward"]
            if forward and isinstance(node.meta.get("val"), Tensor) and "parameter" not in node.meta:
                found = node
        return found

    # Parts of lives.

    def _way_to_uses(self, flat: fx.Node, bucket: Bucket, slot: Slot) -> Iterator[Event]:
        """From where it is stored: what moves the bucket, the views that are this parameter, and who reads them."""
        views, way = self._views(flat, slot)
        yield from self._moves(way)
        for view in views:
            yield from self._used(view)
        for node in way:
            # What was gathered is let go of behind the last that reads any of it.
            if is_wait(node):
                yield from self._freed(node)
            elif boxing_of(node) is None and node.target is aten._to_copy.default:
                for event in self._freed(node):
                    yield replace(event, what="cast freed")

    def _views(self, flat: fx.Node, slot: Slot) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes that are the parameter, and those on the way to them from the bucket, in order."""
        views: list[fx.Node] = []
        behind: dict[fx.Node, fx.Node] = {}
        stack = [flat]
        while stack:
            node = stack.pop()
            for user in self.spots.readers(node):
                if user in behind:
                    continue
                behind[user] = node
                mine = meta(user).get("parameter")
                if mine == slot.name:
                    views.append(user)
                elif mine is None and (_is_form(user) or user.target in (FETCH, TRANSFER)):
                    stack.append(user)
        way: dict[fx.Node, None] = {}
        for view in views:
            node = view
            while node in behind:
                node = behind[node]
                way[node] = None
        if self.step.context.buckets and len(views) == 0 and len(_slots(self.step, flat)) == 1:
            views = [flat]
        return sorted(views, key=self.spots.at), sorted(way, key=self.spots.at)

    def _moves(self, way: Iterable[fx.Node]) -> Iterator[Event]:
        for node in way:
            found = boxing_of(node)
            if found is not None:
                yield self._event(f"{_WORDS.get(found.kind, found.kind)} starts", node, note=_boxing(found))
            elif is_wait(node) and (started := boxing_of(node.all_input_nodes[0])) is not None:
                yield self._event(f"{_WORDS.get(started.kind, started.kind)} ends", node, count=self._bytes(node))
            elif node.target is aten._to_copy.default:
                yield self._event(
                    "cast", node, note=f"to {dtype_name(node.meta['val'].dtype)}", count=self._bytes(node)
                )
            elif node.target in (FETCH, TRANSFER):
                what = "fetched" if node.target is FETCH else "carried"
                yield self._event(what, node, note=_device(node), count=self._bytes(node))

    def _used(self, view: fx.Node) -> Iterator[Event]:
        """Who computes with the value: through views, casts and transposes of it."""
        for form, user in self._users(view):
            note = operator_name(user)
            if form is not view and form.target is aten._to_copy.default:
                note += f", as {dtype_name(form.meta['val'].dtype)}"
            yield self._event("used", user, note=note)

    def _users(self, value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(form of the value that is read, reader), each reader once."""
        for form, user in self._readers(value, _TRANSFERS):
            if user.op != "output" and (not _is_form(user) or user.target in _TRANSFERS):
                yield form, user

    def _uses(self, node: fx.Node) -> Iterator[Event]:
        """As :meth:`_used`, with what moves the value, and where it is freed or given back."""
        for form, user in self._readers(node):
            if user.op == "output":
                yield self._event("returned", user)
            elif _is_form(user):
                yield from self._moves([user])
            elif form not in written_arguments(user):
                yield self._event("used", user, note=operator_name(user))
        yield from self._freed(node)

    def _readers(self, value: fx.Node, ends: Collection[Any] = ()) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(form of the value, who reads it), its other forms among them, each once; not beyond operators ``ends``."""
        seen: set[fx.Node] = set()
        stack = [value]
        while stack:
            form = stack.pop()
            for user in self.spots.readers(form):
                if user not in seen:
                    seen.add(user)
                    yield form, user
                    if _is_form(user) and user.target not in ends:
                        stack.append(user)

    def _freed(self, node: fx.Node) -> Iterator[Event]:
        storage = self.spots.storage(node)
        if storage is None:
            return
        last, count = storage
        yield self._event("freed", last, note=f"behind {last.name}", count=count)

    def _gradient(self, bucket: Bucket, slot: Slot) -> Iterator[Event]:
        for spot in self.spots:
            node = spot.node
            if meta(node).get("gradient") == bucket.name:
                for maker in _makers(node, bucket, slot):
                    size = slot.numel * node.meta["val"].element_size()
                    yield self._event("gradient made", maker, note=operator_name(maker), count=size)
            moved = boxing_of(node)
            if moved is not None and moved.tensor.gradient_of(bucket.name):
                yield self._event("reduction starts", node, note=_boxing(moved))
            started = boxing_of(node.all_input_nodes[0]) if is_wait(node) else None
            if started is not None and started.tensor.gradient_of(bucket.name):
                yield self._event("reduction ends", node)
            if meta(node).get("gradient") == bucket.name and moved is None:
                for event in self._freed(node):
                    yield replace(event, what="gradient freed")

    def _updates(self, node: fx.Node, bucket: Bucket) -> Iterator[Event]:
        """What writes the state, the last of it."""
        update = self.step.context.updates.get(bucket.name)
        writers = [spot.node for spot in self.spots if self._writes(spot.node, node)]
        if update is None or not writers:
            return
        nodes = f" in {len(writers)} nodes" if len(writers) > 1 else ""
        yield self._event(
            "updated", writers[-1], note=f"{update.program.optimizer}{nodes}, {operator_name(writers[-1])}"
        )

    def _writes(self, node: fx.Node, state: fx.Node) -> bool:
        if node.op == "call_module" and "bucket" in node.meta:
            return state in node.all_input_nodes
        return any(self.spots.same_memory(one, state) for one in written_arguments(node)) and node is not state

    # Numbers and words.

    def _share(self, bucket: Bucket, slot: Slot) -> int:
        """Bytes of the parameter on this rank: of what is cut through, the part that lies in its shard."""
        mesh = self.step.context.mesh
        row, shard = slot.numel, bucket.padded
        if isinstance(bucket.sbp[bucket.zero_dim], Split) and not bucket.by_user:
            shard //= mesh.shape[bucket.zero_dim]
            start = mesh.position[bucket.zero_dim] * shard
            row = max(0, min(slot.offset + slot.numel, start + shard) - max(slot.offset, start))
        rows = 1
        if bucket.rows is not None:
            rows = local_shape(bucket.shape, bucket.sbp, mesh)[0]
        return row * rows * bucket.dtype.itemsize

    def _stored(self, bucket: Bucket, slot: Slot) -> Event:
        index = bucket.slots.index(slot)
        inside = f"{bucket.name} {show(bucket.sbp)}, elements {slot.offset:,} to {slot.offset + slot.numel:,}"
        owner = f"all of it on rank {bucket.owners[index]}" if bucket.owners is not None else ""
        note = ", ".join(filter(None, (inside, owner, rests(bucket))))
        return _held_here("stored", note, self._share(bucket, slot))

    def _state(self, bucket: Bucket, slot: Slot) -> Iterator[Event]:
        update = self.step.context.updates.get(bucket.name)
        if update is not None and update.layouts:
            index = bucket.slots.index(slot)
            held = [(name, one, one.slots[index]) for name, one in update.layouts.items()]
            note = ", ".join(f"{name} {show(one.sbp_of(own))}" for name, one, own in held)
            count = sum(self._share(one, own) for _, one, own in held)
            yield _held_here("state stored", note, count)

    def _bytes(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        return value.numel() * value.element_size() if isinstance(value, Tensor) else 0

    def _event(self, what: str, node: fx.Node, note: str = "", count: int | None = None) -> Event:
        spot: Spot = self.spots[node]
        where, moved = origin(node), boxing_of(node)
        size = count if count is not None else round(moved.sent) if moved is not None else 0
        phase: str = "end of the step" if node.op == "output" else where.phase
        return Event(what, node.name, spot.at, spot.times, phase, where.module, where.source, where.code, size, note)

    def _life(self, node: fx.Node, kind: TensorKind, events: Iterable[Event]) -> Life:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            yields = [user.name for user in node.users]
            raise ConfigError(
                f"{node.name} yields several tensors: ask for one of {', '.join(yields) or 'its readers'}"
            )
        sbp: NdSbp | None = meta(node).get("sbp")
        return Life(
            name=labels(node.graph)[node],
            asked=self.asked,
            kind=kind,
            dtype=dtype_name(value.dtype),
            shape=tuple(meta(node).get("global", value.shape)),
            local=tuple(value.shape),
            sbp="local" if sbp is None else show(sbp),
            bucket=None,
            bytes=self._bytes(node),
            events=_in_order(events),
        )


_HELP = (
    "Ask for a parameter, a buffer, input0, a node of step.text(), or a module for what it yields: "
    "step.describe() lists the parameters."
)
# Of these a transfer ends: what is computed with is not behind them.
_TRANSFERS = (WAIT_TRANSFER, WRITE_BACK)
_WORDS = {"all-gather": "gather", "reduce-scatter": "reduction", "all-reduce": "reduction"}


def _is_form(node: fx.Node) -> bool:
    """Whether the node is only another form of what it reads: a view, a copy, or on its way to other ranks."""
    return boxing_of(node) is not None or is_wait(node) or is_view_or_copy(node)


def _slots(step: RewrittenStep, flat: fx.Node) -> Sequence[Slot]:
    return next(bucket.slots for bucket in step.context.buckets if bucket.name == meta(flat)["role"].name)


def _makers(joined: fx.Node, bucket: Bucket, slot: Slot) -> list[fx.Node]:
    """The nodes that make a parameter's part of its bucket's gradient."""
    slots = sorted(bucket.slots, key=lambda one: one.offset)
    if joined.target is aten.cat.default:
        part = joined.all_input_nodes[slots.index(slot)]
        return [_computes(part)]
    if joined.target is not aten.empty.memory_format:
        return [_computes(joined)]
    pieces = [one for one in joined.users if one.target is aten.slice.Tensor and one.args[2] == slot.offset]
    found = []
    for piece in pieces:
        for view in piece.users:
            for user in view.users:
                if view in written_arguments(user):
                    copied = user.target is aten.copy_.default
                    source = user.args[1] if copied else user
                    found.append(_computes(source) if isinstance(source, fx.Node) else user)
    return found


def _computes(node: fx.Node) -> fx.Node:
    """The node that computes the values of which this one is only another form."""
    while _is_form(node) or node.target is aten.constant_pad_nd.default:
        node = node.all_input_nodes[0]
    return node


def _boxing(found: Boxing) -> str:
    along = f" along mesh dimension {found.dim}" if len(found.source) > 1 else ""
    return f"{found.kind} {show(found.source)} -> {show(found.target)}{along} of {found.tensor}"


def _held_here(what: str, note: str, count: int) -> Event:
    return Event(what, bytes=count, note=f"{note}; {'on this rank' if count else 'nothing on this rank'}")


def _device(node: fx.Node) -> str:
    return f"to {node.meta['val'].device}"


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    unique = dict.fromkeys(events)
    return tuple(sorted(unique, key=lambda one: (-1 if one.at is None else one.at, one.what.endswith("freed"))))
