"""box: where a tensor's SBP is not the one that its reader needs, one boxing node stands between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from zerograph.ir.metadata import Boxing, TensorRef, meta, origin, role
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import NdSbp, Split, broadcast, show
from zerograph.passes.accumulation.in_time import packed, packed_sbp, through_time
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.place import needed
from zerograph.passes.placement.route import held_bytes, route


def box(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Every operator reads its inputs in the SBP of its signature; readers with the same need share a boxing node."""
    graph = module.graph
    made: dict[tuple[fx.Node, NdSbp], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is boxing:
            _split_steps(graph, node, context)
            continue
        if node.op == "output" and context.batch.packed:
            _pack_outputs(graph, node, context)
        inputs = [_boxed(graph, given, sbp, node, made, context) for given, sbp in needed(node)]
        _replace_tensors(node, inputs)
    return module


def _pack_outputs(graph: fx.Graph, output: fx.Node, context: Context) -> None:
    """What every micro-batch makes of an output is returned one behind the other."""
    with graph.inserting_before(output):
        pairs = [
            (given, sbp)
            if meta(given)["sbp"][-1] == broadcast
            else (packed(graph, given, context), packed_sbp((*sbp[:-1], broadcast)))
            for given, sbp in needed(output)
        ]
    output.args = (tuple(given for given, _ in pairs),)
    meta(output)["needs"] = [sbp for _, sbp in pairs]


def _boxed(
    graph: fx.Graph,
    given: fx.Node,
    sbp: NdSbp,
    reader: fx.Node,
    made: dict[tuple[fx.Node, NdSbp], fx.Node],
    context: Context,
) -> fx.Node:
    """``given`` in the SBP that ``reader`` needs; ``made`` remembers the boxing nodes so far."""
    source = given
    for step in _route(given, sbp, context, ranks_first=False):
        if (given, step) not in made:
            with graph.inserting_before(reader):
                made[given, step] = emit(graph, boxing, (source, show(step)), origin(reader), sbp=step)
            _describe(made[given, step], _name_of(given), context)
        source = made[given, step]
    return source


def _split_steps(graph: fx.Graph, node: fx.Node, context: Context) -> None:
    """A boxing node that an earlier pass asked for: one node for each step of its way."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    source = given
    target: NdSbp = meta(node)["sbp"]
    # Of a gradient that rests split, what each micro-batch adds is scattered at once where the stage says so.
    early = context.policy.split and context.policy.reduce_early and isinstance(target[context.policy.dim], Split)
    for step in _route(given, target, context, ranks_first=early)[:-1]:
        with graph.inserting_before(node):
            source = emit(graph, boxing, (source, show(step)), origin(node), sbp=step)
        meta(source)["tensor"] = meta(node)["tensor"]
        _describe(source, meta(node)["tensor"], context)
    node.replace_input_with(given, source)
    if meta(source)["sbp"] == meta(node)["sbp"]:
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    else:
        _describe(node, meta(node)["tensor"], context)


def _route(given: fx.Node, sbp: NdSbp, context: Context, *, ranks_first: bool) -> tuple[NdSbp, ...]:
    value: Tensor = given.meta["val"]
    kind = tuple(value.shape), value.element_size(), context.mesh
    if context.timed:
        return through_time(meta(given)["sbp"], sbp, *kind, ranks_first=ranks_first)
    return route(meta(given)["sbp"], sbp, *kind)


def _replace_tensors(node: fx.Node, inputs: Sequence[fx.Node]) -> None:
    """By position, not by name: an operator may need one tensor in two SBPs."""
    remaining = iter(inputs)

    def replaced(argument: fx.Node) -> fx.Node:
        return next(remaining) if isinstance(argument.meta.get("val"), Tensor) else argument

    if inputs:
        args, kwargs = fx.map_arg((node.args, node.kwargs), replaced)
        node.args, node.kwargs = args, kwargs


def _describe(node: fx.Node, tensor: TensorRef, context: Context) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before: NdSbp = meta(source)["sbp"]
    after: NdSbp = meta(node)["sbp"]
    value: Tensor = node.meta["val"]
    dim = next(index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
    held = held_bytes(before, dim, tuple(value.shape), value.element_size(), context.mesh)
    meta(node)["boxing"] = Boxing(before, after, dim, context.mesh.shape[dim], tensor, held, origin(node).phase)


def _name_of(node: fx.Node) -> TensorRef:
    known = role(node)
    if known is None:
        where = origin(node)
        return TensorRef("value", f"{node.name} of {where.module or where.source or 'the step'}")
    if known.kind == "bucket":
        return TensorRef("bucket", known.name)
    return TensorRef("value", known.name if known.kind in ("state", "buffer") else str(known))
