"""merge_updates: let one fused operator update all buckets that have the same hyperparameters.

On an accelerator each call of a fused operator is a launch, whatever the size of the bucket. Updates between which the
step waits for a collective stay apart, so that the first ones overlap it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zerograph._torch import written_arguments
from zerograph.ir.alias import WAIT, base_of
from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import Origin
from zerograph.ir.rewrite import emit, keywords
from zerograph.passes.buckets.fuse import FUSED_UPDATES
from zerograph.passes.context import Context

aten = torch.ops.aten
_COUNT = aten._foreach_add_.Scalar


def merge_updates(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Update buckets with equal hyperparameters by one call where no collective is waited for in between."""
    graph = module.graph
    if any(map(_is_offloaded, context.buckets)):
        # Shards are updated one by one while others are moved.
        return module
    for calls in list(_runs(graph)):
        if len(calls) > 1:
            # Counts are read by the updates after them.
            _merge(calls, calls[0] if calls[0].target is _COUNT else calls[-1])
    return module


def _is_offloaded(bucket: Bucket) -> bool:
    in_files = bucket.storage.parameters is not None or bucket.storage.state is not None
    return in_files or bucket.storage_device != bucket.device


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the calls that one call replaces: nothing else uses their memory between the first and the last."""
    runs: dict[Hashable, list[fx.Node]] = {}
    # For each run the owners of memory that is used since its first call.
    used: dict[Hashable, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is WAIT:
            for key in [key for key, calls in runs.items() if calls[0].target is not _COUNT]:
                yield runs.pop(key)
        kind = _kind(node) if node.target is _COUNT or node.target in FUSED_UPDATES else None
        owners = set(map(base_of, node.all_input_nodes))
        for key, calls in list(runs.items()):
            moved = owners if key == kind and node.target is _COUNT else None
            written = {base_of(argument) for call in calls for argument in written_arguments(call)}
            ends = not moved.isdisjoint(used[key]) if moved is not None else not owners.isdisjoint(written)
            # A count moves up to the first one; the other calls move down to the last one.
            if ends and (moved is not None or calls[0].target is not _COUNT):
                yield runs.pop(key)
            else:
                used[key] |= owners
        if kind is not None:
            runs.setdefault(kind, []).append(node)
            if len(runs[kind]) == 1:
                used[kind] = set(owners)
    yield from runs.values()


def _kind(node: fx.Node) -> Hashable:
    """Return what the calls of one run have in common."""
    lists, rest = _operands(node)
    values = [source.meta["val"] for sources in lists for source in sources]
    return (node.target, tuple(map(len, lists)), rest, tuple((value.dtype, value.device) for value in values))


def _operands(node: fx.Node) -> tuple[list[Sequence[Any]], tuple[Any, ...]]:
    """Return the lists of tensors, and the other arguments."""
    lists: list[Any] = [argument for argument in node.args if isinstance(argument, (list, tuple))]
    others = [argument for argument in node.args if not isinstance(argument, (list, tuple))]
    return lists, (*others, *sorted(node.kwargs.items()))


def _merge(calls: Sequence[fx.Node], place: fx.Node) -> None:
    args: list[Any] = list(place.args)
    for position, argument in enumerate(args):
        if isinstance(argument, (list, tuple)):
            args[position] = [source for call in calls for source in _list_at(call, position)]
    with place.graph.inserting_before(place):
        emit(place.graph, place.target, tuple(args), Origin("update"), **keywords(place))
    for call in calls:
        place.graph.erase_node(call)


def _list_at(call: fx.Node, position: int) -> Sequence[Any]:
    argument = call.args[position]
    assert isinstance(argument, (list, tuple))
    return argument
