"""Boxing along time: what a loop over micro-batches takes in, and what it leaves behind.

Nothing is sent, but what comes out of the loop is there only when the last micro-batch is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing, meta, origin, role
from zerograph.ir.rewrite import emit, fake
from zerograph.ir.sbp import NdSbp, PartialSum, Sbp, Split, broadcast, show
from zerograph.passes.context import Context
from zerograph.passes.placement.route import route

aten = torch.ops.aten


def enter(x: Tensor, along: int, micro_batches: int) -> Tensor:
    """A micro-batch's part of ``x``. Stands, until ``loop``, for what the loop cuts for each run."""
    return x.narrow(along, 0, x.shape[along] // micro_batches)


def leave(x: Tensor, along: int | None, micro_batches: int) -> Tensor:
    """The sum of what every micro-batch makes, or all of it end to end along a dimension; likewise."""
    shape = list(x.shape)
    if along is not None:
        shape[along] *= micro_batches
    return x.new_empty(shape)


def pack(x: Tensor, sbp: str) -> Tensor:
    """What every micro-batch makes of a global tensor, stacked in a new first dimension. Until ``localize``."""
    raise NotImplementedError("stands for what localize makes of it")


def through_time(
    source: NdSbp, target: NdSbp, shape: tuple[int, ...], itemsize: int, mesh: Mesh, *, ranks_first: bool
) -> tuple[NdSbp, ...]:
    """The SBPs on the way from ``source`` (left out) to ``target``, where the last mesh dimension is time.

    Args:
        shape, itemsize: of the global tensor.
        ranks_first: what leaves the loop is moved between the ranks for each micro-batch; else once, when all are done.
    """
    before, after = source[-1], target[-1]
    ranks = Mesh(mesh.shape[:-1], mesh.position[:-1], mesh.groups[:-1])
    between_ranks = route(source[:-1], target[:-1], shape, itemsize, ranks)
    stays = before == after or (after == broadcast and ranks_first)
    if stays and not _cut_finer(source, target, mesh):
        inside = tuple((*step, before) for step in between_ranks)
        return inside if before == after else (*inside, target)
    left = () if before == broadcast else ((*source[:-1], broadcast),)
    entered = () if after == broadcast else (target,)
    return (*left, *((*step, broadcast) for step in between_ranks), *entered)


def _cut_finer(source: NdSbp, target: NdSbp, mesh: Mesh) -> bool:
    """Whether time cuts further what ranks cut before or after, but not both: their parts are then no slices."""
    time, ranks = source[-1], zip(source[:-1], target[:-1], mesh.shape[:-1], strict=True)
    return isinstance(time, Split) and any(
        one != other and time in (one, other) and size > 1 for one, other, size in ranks
    )


def packed(graph: fx.Graph, given: fx.Node, context: Context) -> fx.Node:
    """``given`` with an entry for each micro-batch, in front; of a sum, so scaled that the entries' mean is the sum."""
    before: NdSbp = meta(given)["sbp"]
    value: Tensor = given.meta["val"]
    shape, source = list(value.shape), given
    if isinstance(before[-1], PartialSum):
        source = emit(graph, aten.mul.Tensor, (given, context.batch.micro_batches), origin(given), sbp=before)
    elif isinstance(before[-1], Split):
        shape[before[-1].dim] //= context.batch.micro_batches
    after = packed_sbp((*before[:-1], broadcast))
    node = graph.call_function(pack, (source, show(after)))
    whole = fake(graph, (context.batch.micro_batches, *shape), value.dtype, value.device)
    meta(node).update({"val": whole, "sbp": after, "origin": origin(given)})
    return node


def packed_sbp(sbp: NdSbp) -> NdSbp:
    """The same behind a further dimension."""
    return tuple(map(_behind, sbp))


def _behind(one: Sbp) -> Sbp:
    return Split(one.dim + 1) if isinstance(one, Split) else one


def follow_from_batch(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that only inputs, buffers, random numbers and constants lead to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        known = role(node)
        if node.op == "placeholder":
            follows = known is not None and known.kind in _AT_HAND
        else:
            follows = node.op in ("call_function", "get_attr") and found.issuperset(node.all_input_nodes)
        if follows:
            found.add(node)
    return frozenset(found)


_AT_HAND = ("input", "buffer", "seed", "scaler")


def sbps(node: fx.Node) -> Sequence[NdSbp]:
    """The SBP of each tensor that the node yields."""
    found: Any = meta(node).get("sbp", ())
    return found if not found or isinstance(found[0], tuple) else (found,)


def change_sbps(node: fx.Node, change: Callable[[NdSbp], NdSbp]) -> None:
    """Give each tensor that the node yields another SBP."""
    found = tuple(map(change, sbps(node)))
    if found:
        meta(node)["sbp"] = found if isinstance(meta(node)["sbp"][0], tuple) else found[0]


def along_time(node: fx.Node, context: Context) -> Boxing | None:
    """What a boxing node does, if it is along time."""
    found = meta(node).get("boxing")
    return found if isinstance(found, Boxing) and found.dim == context.time_dim else None
