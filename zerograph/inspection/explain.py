"""Trace one tensor through a step: stored, gathered, used, freed, its gradient computed and reduced, updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from zerograph._torch import written_arguments
from zerograph.compiler.compiled import PreparedStep
from zerograph.errors import ConfigError, did_you_mean
from zerograph.inspection.lifetime import Event, Life, TensorKind
from zerograph.inspection.names import is_wait, within
from zerograph.inspection.node_table import NodeTable
from zerograph.inspection.summary import offloaded_to
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.alias import is_view_or_copy
from zerograph.ir.buckets import Bucket
from zerograph.ir.mesh import index_along, local_shape
from zerograph.ir.metadata import Boxing, boxing_of, meta, origin, role
from zerograph.ir.sbp import NdSbp, Split, show
from zerograph.ir.slots import Slot
from zerograph.ir.step_graph import nbytes, placeholders
from zerograph.ops.offload import FETCH, TRANSFER, WAIT_TRANSFER, WRITE_BACK

aten = torch.ops.aten


def explain(step: PreparedStep, asked: str) -> Life:
    """Return the lifetime of the tensor of that name; see :meth:`zerograph.inspection.step.Inspection.explain`."""
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
            return finder.whole(node, kind)
    if (node := finder.placeholder("input", name.removeprefix("input"))) is not None:
        return finder.whole(node, "input")
    return finder.computed(name)


class _Finder:
    """Looks one name up in the emitted graph and collects the events of its lifetime."""

    def __init__(self, step: PreparedStep, asked: str) -> None:
        self.step, self.asked = step, asked
        self.graph = step.emitted
        self.table = NodeTable(self.graph)
        inputs = ((role(node), node) for node in placeholders(self.graph))
        self._inputs: dict[tuple[str, str], fx.Node] = {
            (value.kind, value.name): node for value, node in inputs if value is not None
        }

    def placeholder(self, kind: str, name: str) -> fx.Node | None:
        return self._inputs.get((kind, name))

    def parameter(self, bucket: Bucket, slot: Slot) -> Life:
        flat = self.placeholder("bucket", bucket.name)
        sbp = bucket.sbp_of(slot)
        events = [self._stored(bucket, slot), *self._state(bucket, slot)]
        if flat is not None:
            events += self._path_to_users(flat, bucket, slot)
        events += self._gradient(bucket, slot)
        if flat is not None:
            events += self._updates(flat, bucket)
        # A split of the flat bucket does not split the parameter's own dimensions.
        flat_split = isinstance(sbp[bucket.zero_dims[0]], Split) and not slot.split
        local = slot.shape if flat_split else local_shape(slot.shape, sbp, self.step.context.mesh)
        share = self._share(bucket, slot)
        return self._life(slot.name, "parameter", bucket.dtype, slot.shape, local, sbp, share, events, bucket.name)

    def state(self, bucket: Bucket, slot: Slot, entry: str, node: fx.Node) -> Life:
        update = self.step.context.updates[bucket.name]
        layout = update.layouts.get(entry)
        value: Tensor = node.meta["val"]
        if layout is None:
            shape, sbp = tuple(value.shape), meta(node)["sbp"]
            count, scope = nbytes(value), "one for the whole bucket"
        else:
            index = bucket.slots.index(slot)
            shape, sbp = layout.slots[index].shape, layout.sbp_of(layout.slots[index])
            count, scope = self._share(layout, layout.slots[index]), ""
        note = ", ".join(filter(None, (f"{bucket.name}.{entry} {show(sbp)}", scope, offloaded_to(bucket))))
        events = [Event("stored", bytes=count, note=note), *self._updates(node, bucket)]
        name = f"{slot.name}.{entry}"
        return self._life(name, "optimizer state", value.dtype, shape, shape, sbp, count, events, bucket.name)

    def whole(self, node: fx.Node, kind: str) -> Life:
        """Return the lifetime of another input of the graph: a batch tensor, buffer, bucket, parameter in no bucket."""
        kinds: dict[str, TensorKind] = {"input": "input", "buffer": "buffer", "parameter": "parameter"}
        first = Event("stored", bytes=self._bytes(node))
        if kind == "input":
            first = Event("given", phase="call", bytes=self._bytes(node))
        writes = [
            self._event("updated", user, note=operator_name(user))
            for user in self.table.readers(node)
            if node in written_arguments(user)
        ]
        return self._life_of(node, kinds.get(kind, "optimizer state"), [first, *self._uses(node), *writes])

    def computed(self, name: str) -> Life:
        node = self._node(name)
        first = self._event("made", node, note=operator_name(node), count=self._bytes(node))
        return self._life_of(node, "value", [first, *self._uses(node)])

    def _node(self, name: str) -> fx.Node:
        """Return the node of that name, or the output of a module of that name."""
        # Bodies of loops come last: a name in one may be that of another node in the graph.
        names = {row.node: row.label for row in sorted(self.table, key=lambda row: len(row.loops))}
        node_name = name.rpartition(":")[2]
        for node, label in names.items():
            if node.op != "output" and name in (label, node.name):
                return node
        # The module in a label can differ after a pass; the node's own name stays.
        for node in names:
            if ":" in name and node.name == node_name:
                return node
        output = self._output_of(name)
        if output is not None:
            return output
        hint = did_you_mean(name, self._candidates(names.values()))
        raise ConfigError(f"the step has no tensor {name!r}{hint}\n{_HELP}")

    def _candidates(self, names: Iterable[str]) -> list[str]:
        slots = [slot.name for bucket in self.step.context.buckets for slot in bucket.slots]
        modules = {origin(row.node).module for row in self.table}
        return [*slots, *self.step.aliases, *modules, *names]

    def _output_of(self, module: str) -> fx.Node | None:
        """Return the last value of forward that the module computes and a node outside of it reads."""
        output = None
        for row in self.table:
            node = row.node
            if node.op == "placeholder" or origin(node).phase != "forward" or not within(origin(node).module, module):
                continue
            outside = [user for user in node.users if user.op == "output" or not within(origin(user).module, module)]
            forward = [user for user in outside if user.op == "output" or origin(user).phase == "forward"]
            if forward and isinstance(node.meta.get("val"), Tensor) and "parameter" not in node.meta:
                output = node
        return output

    # Parts of a lifetime.

    def _path_to_users(self, flat: fx.Node, bucket: Bucket, slot: Slot) -> Iterator[Event]:
        """Yield the events from storage to use: moves of the bucket, and users of this parameter's views."""
        views, path = self._views(flat, bucket, slot)
        yield from self._moves(path)
        for view in views:
            yield from self._used(view)
        for node in path:
            # A gathered bucket is freed after the last reader of any of it.
            if is_wait(node):
                yield from self._freed(node)
            elif boxing_of(node) is None and node.target is aten._to_copy.default:
                for event in self._freed(node):
                    yield replace(event, what="cast freed")

    def _views(self, flat: fx.Node, bucket: Bucket, slot: Slot) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes that are the parameter, and the nodes between the bucket and them, in order."""

        def leads_on(user: fx.Node) -> bool:
            return "parameter" not in user.meta and (_is_form(user) or user.target in (FETCH, TRANSFER))

        predecessors = {user: node for node, user in self._readers(flat, leads_on)}
        views = [user for user in predecessors if meta(user).get("parameter") == slot.name]
        path: dict[fx.Node, None] = {}
        for view in views:
            node = view
            while node in predecessors:
                node = predecessors[node]
                path[node] = None
        if not views and len(bucket.slots) == 1:
            views = [flat]
        return sorted(views, key=self.table.index), sorted(path, key=self.table.index)

    def _moves(self, path: Iterable[fx.Node]) -> Iterator[Event]:
        for node in path:
            boxing = boxing_of(node)
            if boxing is not None:
                yield self._event(f"{_WORDS.get(boxing.kind, boxing.kind)} starts", node, note=_boxing(boxing))
            elif is_wait(node) and (started := boxing_of(node.all_input_nodes[0])) is not None:
                yield self._event(f"{_WORDS.get(started.kind, started.kind)} ends", node, count=self._bytes(node))
            elif node.target is aten._to_copy.default:
                yield self._event(
                    "cast", node, note=f"to {dtype_name(node.meta['val'].dtype)}", count=self._bytes(node)
                )
            elif node.target in (FETCH, TRANSFER):
                what = "fetched" if node.target is FETCH else "copied"
                yield self._event(what, node, note=f"to {node.meta['val'].device}", count=self._bytes(node))

    def _used(self, view: fx.Node) -> Iterator[Event]:
        """Yield the computations that read a value, also through its views, casts and transposes."""
        for form, user in self._readers(view, lambda user: _is_form(user) and user.target not in _TRANSFERS):
            if user.op == "output" or (_is_form(user) and user.target not in _TRANSFERS):
                continue
            note = operator_name(user)
            if form is not view and form.target is aten._to_copy.default:
                note += f", as {dtype_name(form.meta['val'].dtype)}"
            yield self._event("used", user, note=note)

    def _uses(self, node: fx.Node) -> Iterator[Event]:
        """Yield the events of :meth:`_used`, and where the value is moved, freed or returned."""
        for form, user in self._readers(node, _is_form):
            if user.op == "output":
                yield self._event("returned", user)
            elif _is_form(user):
                yield from self._moves([user])
            elif form not in written_arguments(user):
                yield self._event("used", user, note=operator_name(user))
        yield from self._freed(node)

    def _readers(self, value: fx.Node, leads_on: Callable[[fx.Node], bool]) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield (form of a value, reader), each reader once: those of a value, and of its readers that lead on."""
        seen: set[fx.Node] = set()
        stack = [value]
        while stack:
            form = stack.pop()
            for user in self.table.readers(form):
                if user not in seen:
                    seen.add(user)
                    yield form, user
                    if leads_on(user):
                        stack.append(user)

    def _freed(self, node: fx.Node) -> Iterator[Event]:
        storage = self.table.storage(node)
        if storage is None:
            return
        last, count = storage
        yield self._event("freed", last, note=f"after {last.name}", count=count)

    def _gradient(self, bucket: Bucket, slot: Slot) -> Iterator[Event]:
        for row in self.table:
            node = row.node
            if meta(node).get("gradient") == bucket.name:
                for source in _sources(node, bucket, slot):
                    size = slot.numel * node.meta["val"].element_size()
                    yield self._event("gradient made", source, note=operator_name(source), count=size)
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
        """Yield the last write to the state."""
        update = self.step.context.updates.get(bucket.name)
        writers = [row.node for row in self.table if self._writes(row.node, node)]
        if update is None or not writers:
            return
        nodes = f" in {len(writers)} nodes" if len(writers) > 1 else ""
        yield self._event(
            "updated", writers[-1], note=f"{update.program.optimizer}{nodes}, {operator_name(writers[-1])}"
        )

    def _writes(self, node: fx.Node, state: fx.Node) -> bool:
        if node.op == "call_module" and "bucket" in node.meta:
            return state in node.all_input_nodes
        return any(self.table.same_memory(written, state) for written in written_arguments(node)) and node is not state

    # Numbers and texts.

    def _share(self, bucket: Bucket, slot: Slot) -> int:
        """Return the bytes of a parameter in this rank's shard."""
        mesh = self.step.context.mesh
        numel, shard = slot.numel, bucket.padded
        if isinstance(bucket.sbp[bucket.zero_dims[0]], Split) and not bucket.by_user:
            shard //= bucket.ranks
            start = index_along(mesh, bucket.zero_dims) * shard
            numel = max(0, min(slot.offset + slot.numel, start + shard) - max(slot.offset, start))
        rows = 1
        if bucket.rows is not None:
            rows = local_shape(bucket.shape, bucket.sbp, mesh)[0]
        return numel * rows * bucket.dtype.itemsize

    def _stored(self, bucket: Bucket, slot: Slot) -> Event:
        index = bucket.slots.index(slot)
        inside = f"{bucket.name} {show(bucket.sbp)}, elements {slot.offset:,} to {slot.offset + slot.numel:,}"
        owner = f"all of it on rank {bucket.owners[index]}" if bucket.owners is not None else ""
        note = ", ".join(filter(None, (inside, owner, offloaded_to(bucket))))
        return _stored_event("stored", note, self._share(bucket, slot))

    def _state(self, bucket: Bucket, slot: Slot) -> Iterator[Event]:
        update = self.step.context.updates.get(bucket.name)
        if update is not None and update.layouts:
            index = bucket.slots.index(slot)
            entries = [(name, layout, layout.slots[index]) for name, layout in update.layouts.items()]
            note = ", ".join(f"{name} {show(layout.sbp_of(entry))}" for name, layout, entry in entries)
            count = sum(self._share(layout, entry) for _, layout, entry in entries)
            yield _stored_event("state stored", note, count)

    def _bytes(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        return nbytes(value) if isinstance(value, Tensor) else 0

    def _event(self, what: str, node: fx.Node, note: str = "", count: int | None = None) -> Event:
        where, moved = origin(node), boxing_of(node)
        size = count if count is not None else round(moved.sent) if moved is not None else 0
        phase: str = "end of the step" if node.op == "output" else where.phase
        return Event(
            what,
            node.name,
            self.table[node].index,
            self.table[node].times,
            phase,
            where.module,
            where.source,
            where.code,
            size,
            note,
        )

    def _life_of(self, node: fx.Node, kind: TensorKind, events: Iterable[Event]) -> Life:
        value = node.meta.get("val")
        if isinstance(value, (int, torch.SymInt, torch.SymFloat)):
            raise ConfigError(f"{node.name} is a size, {value}, and no tensor: ask for a tensor with such a dimension")
        if not isinstance(value, Tensor):
            items = [user.name for user in node.users]
            raise ConfigError(
                f"{node.name} returns several tensors: ask for one of {', '.join(items) or 'its readers'}"
            )
        name, shape, sbp = self.table[node].label, meta(node).get("global", value.shape), meta(node).get("sbp")
        return self._life(name, kind, value.dtype, shape, value.shape, sbp, self._bytes(node), events)

    def _life(
        self,
        name: str,
        kind: TensorKind,
        dtype: torch.dtype,
        shape: Iterable[int],
        local: Iterable[int],
        sbp: NdSbp | None,
        count: int,
        events: Iterable[Event],
        bucket: str | None = None,
    ) -> Life:
        placed = "local" if sbp is None else show(sbp)
        return Life(
            *(name, self.asked, kind, dtype_name(dtype), tuple(shape), tuple(local), placed, bucket, count),
            _in_order(events),
        )


_HELP = (
    "Ask for a parameter, a buffer, input0, a node of step.text(), or a module for its output: "
    "step.describe() lists the parameters."
)
# A transfer ends here: computations do not read the value through these.
_TRANSFERS = (WAIT_TRANSFER, WRITE_BACK)
_WORDS = {"all-gather": "gather", "reduce-scatter": "reduction", "all-reduce": "reduction"}


def _is_form(node: fx.Node) -> bool:
    """Return True if the node is another form of its input: a view, a copy, or in flight to other ranks."""
    return boxing_of(node) is not None or is_wait(node) or is_view_or_copy(node)


def _sources(gradient: fx.Node, bucket: Bucket, slot: Slot) -> list[fx.Node]:
    """Return the nodes that compute a parameter's part of its bucket's gradient."""
    slots = sorted(bucket.slots, key=lambda each: each.offset)
    if gradient.target is aten.cat.default:
        part = gradient.all_input_nodes[slots.index(slot)]
        return [_source(part)]
    if gradient.target is not aten.empty.memory_format:
        return [_source(gradient)]
    pieces = [user for user in gradient.users if user.target is aten.slice.Tensor and user.args[2] == slot.offset]
    sources = []
    for piece in pieces:
        for view in piece.users:
            for user in view.users:
                if view in written_arguments(user):
                    copied = user.target is aten.copy_.default
                    source = user.args[1] if copied else user
                    sources.append(_source(source) if isinstance(source, fx.Node) else user)
    return sources


def _source(node: fx.Node) -> fx.Node:
    """Return the node that computes the value of which this node is another form."""
    while _is_form(node) or node.target is aten.constant_pad_nd.default:
        node = node.all_input_nodes[0]
    return node


def _boxing(boxing: Boxing) -> str:
    along = f" along mesh dimension {boxing.dim}" if len(boxing.source) > 1 else ""
    return f"{boxing.kind} {show(boxing.source)} -> {show(boxing.target)}{along} of {boxing.tensor}"


def _stored_event(what: str, note: str, count: int) -> Event:
    return Event(what, bytes=count, note=f"{note}; {'on this rank' if count else 'nothing on this rank'}")


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    unique = dict.fromkeys(events)
    return tuple(sorted(unique, key=lambda event: (-1 if event.at is None else event.at, event.what.endswith("freed"))))
