"""place: every tensor gets an SBP, every operator the cheapest of its signatures, one mesh dimension after another.

Along a mesh dimension first greedily in graph order, then better where that pays for a boxing (``solve``; what a
choice costs says ``cost``). Whole tensors that only split consumers read (constants, expansions of scalars) are then
made split in the first place, last to first, so that no rank computes what it throws away. A later mesh dimension
sees operators on the pieces that the earlier ones leave, so any signatures of theirs go together.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor, fx

from zerograph.errors import CaptureError
from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.sbp import NdSbp, Sbp, Signature, Split, all_broadcast, broadcast, wire_bytes
from zerograph.ir.step_graph import output_nodes, writes
from zerograph.passes import rules
from zerograph.passes.buckets.deal import dealt_update
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.cost import PACKET
from zerograph.passes.placement.line import Line, Made, open_line
from zerograph.passes.placement.solve import improve
from zerograph.passes.rules.discover import discover


def place(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Every tensor has an SBP, every operator a signature per mesh dimension in ``node.meta["signature"]``."""
    lines: list[Line] = []
    for _ in context.mesh.shape:
        lines.append(_place_along(open_line(module.graph, context, lines), context))
    for node in module.graph.nodes:
        _write_down(node, lines)
    meta(module.graph.output_node())["needs"] = [
        tuple(broadcast if line.is_time else line.returned(line.made(node), line.have(node)) for line in lines)
        for node in output_nodes(module.graph)
    ]
    return module


def needed(node: fx.Node) -> list[tuple[fx.Node, NdSbp]]:
    """Each tensor that the node reads, with the SBP in which it needs it."""
    if node.op == "output":
        return list(zip(output_nodes(node.graph), meta(node)["needs"], strict=True))
    signatures: tuple[Signature, ...] | None = meta(node).get("signature")
    if signatures is None:
        return []
    return [
        (given, tuple(signature.inputs[index] for signature in signatures))
        for index, given in enumerate(rules.tensor_arguments(node))
    ]


def _place_along(line: Line, context: Context) -> Line:
    if line.batch_is_split and not line.is_time and any(_is_cut(bucket, line) for bucket in context.buckets):
        line = replace(line, given=_given_by_batch(line, context))
    free = _choose_greedily(line, context)
    if line.ranks == 1:
        # One placement is as good as another.
        return line
    improve(line, free)
    if line.total_cost() > _WORTH_ANOTHER:
        other = replace(line, sbp={}, signature={})
        _choose_greedily(other, context, free, wary=True)
        improve(other, free)
        if other.total_cost() < line.total_cost():
            line = other
    for node in reversed(free):
        _pull_split(node, line, free)
    if line.is_time:
        _put_behind(line, free)
    return line


def _is_cut(bucket: Bucket, line: Line) -> bool:
    """Whether the user has split the bucket's parameters along this dimension."""
    return bucket.rows is not None and bucket.sbp[line.dim] == Split(0)


def _given_by_batch(line: Line, context: Context) -> dict[Made, Sbp]:
    """What the graph returns would be placed so if every rank held the parameters whole."""
    whole_ones = tuple(
        replace(one, sbp=all_broadcast(context.mesh.dims)) if _is_cut(one, line) else one for one in context.buckets
    )
    other = replace(line, sbp={}, signature={})
    _choose_greedily(other, replace(context, buckets=whole_ones, warn=lambda message: None))
    made = [line.made(node) for node in output_nodes(line.graph)]
    return {(node, index): other.sbp[node][index] for node, index in made}


def _put_behind(line: Line, free: dict[fx.Node, tuple[Signature, ...]]) -> None:
    """What no gradient is made of goes behind the loop, whole, if an operand of it is there only then."""
    trains: set[fx.Node] = set()
    for node in reversed(line.graph.nodes):
        reduces = node.target is boxing and meta(node)["tensor"].kind == "gradient"
        if reduces or not trains.isdisjoint(node.users):
            trains.add(node)
    late: set[fx.Node] = set()
    for node in line.graph.nodes:
        if node not in line.signature:
            continue
        signature = line.signature[node]
        operands = zip(line.inputs(node), signature.inputs, strict=True)
        if any(made[0] in late or (line.leaves(made, need) and made[0] not in line.ahead) for made, need in operands):
            late.add(node)
            if node in free and node not in trains:
                line.choose(node, rules.all_broadcast(node))


# A data-parallel step pays for a few sums and counts only.
_WORTH_ANOTHER = 16 * PACKET


def _choose_greedily(
    line: Line,
    context: Context,
    known: Mapping[fx.Node, tuple[Signature, ...]] = MappingProxyType({}),
    *,
    wary: bool = False,
) -> dict[fx.Node, tuple[Signature, ...]]:
    """Place every node, in graph order; returns the signatures that were free to choose from.

    ``known`` is what an earlier call returned: nodes have the same signatures to choose from, whatever was chosen.
    With ``wary`` a partial sum is rather reduced whole than scattered: what is then split on every rank must often be
    gathered again soon, and makes gradients of whole parameters partial.
    """
    free: dict[fx.Node, tuple[Signature, ...]] = {}
    written = {node for node, _, _ in writes(line.graph)}
    for node in line.graph.nodes:
        if node.op == "placeholder":
            line.sbp[node] = (_at_rest(node, context)[line.dim],)
        elif node.op == "get_attr":
            line.sbp[node] = (broadcast,)
        elif node.target is boxing:
            line.sbp[node] = (meta(node)["target_sbp"][line.dim],)
        elif node.target is dealt_update:
            line.choose(node, meta(node)["signatures"][line.dim])
        elif node in written:
            # State is written in the SBP that it rests in.
            rest = line.sbp[node.args[0]][0]
            line.choose(node, Signature((rest, rest), (rest,)))
        elif node.op == "call_function" and node.target is not operator.getitem:
            free[node] = known[node] if node in known else _candidates(node, line, context)
            line.choose(node, min(free[node], key=lambda signature: line.entry_cost(node, signature, wary=wary)))
    return {node: signatures for node, signatures in free.items() if line.values.get(node)}


def _at_rest(node: fx.Node, context: Context) -> NdSbp:
    found = role(node)
    assert found is not None
    if found.kind == "input":
        sbp = context.batch.inputs[int(found.name)]
        # The whole of this rank's part is there at all times; ``split_micro_batches`` cuts it.
        return (*sbp[:-1], broadcast) if context.timed else sbp
    if found.kind in ("bucket", "state") and node.meta["val"].dim():
        name, _, state = found.name.partition(".")
        if state:
            return context.updates[name].layouts[state].sbp
        return next(bucket.sbp for bucket in context.buckets if bucket.name == name)
    return all_broadcast(context.mesh.dims)


def _candidates(node: fx.Node, line: Line, context: Context) -> tuple[Signature, ...]:
    if not rules.output_values(node):
        return (rules.all_broadcast(node),)
    found = line.signatures(node)
    if found is not None:
        return found
    # Along time nothing can be gathered: what needs it says so in ``hoist_batch_statistics``.
    if line.ranks > 1 and not (line.is_time and context.missing_rules.action == "gather"):
        if context.missing_rules.action == "discover":
            key = (node, line.dim)
            if key not in context.missing_rules.discovered:
                inputs = [line.values[source][index] for source, index in line.inputs(node)]
                context.missing_rules.discovered[key] = discover(node, line.ranks, inputs, line.values[node])
            found = context.missing_rules.discovered[key]
            if found is not None:
                return found
        _report_missing_rule(node, line, context)
    return (rules.all_broadcast(node),)


def _pull_split(node: fx.Node, line: Line, free: dict[fx.Node, tuple[Signature, ...]]) -> None:
    """Compute split what is computed whole although every reader wants the same split of it."""
    if not isinstance(node.meta.get("val"), Tensor) or line.have(node) != broadcast:
        return
    wanted: set[Sbp] = set()
    for user in node.users:
        if user not in line.signature:
            return
        wanted.update(line.needed_by(user, line.signature[user], (node, 0)))
    if len(wanted) != 1 or not isinstance(target := next(iter(wanted)), Split):
        return
    for signature in free[node]:
        pairs = zip(line.inputs(node), signature.inputs, strict=True)
        costless = all(wire_bytes(line.sbp[m[0]][m[1]], sbp, 1, line.ranks) == 0 for m, sbp in pairs)
        if costless and signature.outputs == (target,):
            line.choose(node, signature)
            return


def _write_down(node: fx.Node, lines: list[Line]) -> None:
    """The choices along every mesh dimension, into the node's metadata."""
    if node in lines[0].signature:
        meta(node)["signature"] = tuple(line.signature[node] for line in lines)
    if isinstance(node.meta.get("val"), Tensor):
        meta(node)["sbp"] = tuple(line.have(node) for line in lines)
    elif isinstance(node.meta.get("val"), (list, tuple)) and node.op == "call_function":
        count = len(rules.output_values(node))
        meta(node)["sbp"] = tuple(tuple(line.sbp[node][index] for line in lines) for index in range(count))


def _report_missing_rule(node: fx.Node, line: Line, context: Context) -> None:
    gathered = sum(
        wire_bytes(line.sbp[source][index], broadcast, line.nbytes((source, index)), line.ranks)
        for source, index in line.inputs(node)
    )
    where = origin(node)
    place = f"  {where.source}   {where.code}"
    if context.missing_rules.action == "error":
        raise CaptureError(
            f"no rule says how {node.target} may be split: to gather its inputs is {gathered:,.0f} bytes per step\n"
            f"{place}\nGive it one with zg.register_rule, or set config.on_missing_rule to 'gather' or 'discover'."
        )
    tried = ", and it could not be tried on random data" if context.missing_rules.action == "discover" else ""
    context.warn(
        f"no rule says how {node.target} may be split{tried}: its inputs are gathered, {gathered:,.0f} bytes per step\n"
        f"{place}\nGive it one with zg.register_rule."
    )
