"""place: give every tensor an SBP and every operator its cheapest signature, one mesh dimension after another.

Along a mesh dimension operators are placed greedily in graph order. Where that pays for a boxing, ``solve`` improves
it; ``cost`` is the cost model. Whole tensors that only split consumers read (constants, expansions of scalars) are
then computed split, last to first, so that no rank computes what it throws away. A later mesh dimension sees operators
on the pieces that the earlier ones leave, so any of their signatures go together.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.errors import CaptureError
from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta, origin
from zerograph.ir.sbp import NdSbp, Sbp, Signature, Split, all_broadcast, broadcast, wire_bytes
from zerograph.ir.step_graph import output_nodes, writes
from zerograph.passes import rules
from zerograph.passes.buckets.owner_updates import owner_update
from zerograph.passes.context import Context
from zerograph.passes.placement.attention import ATTENTION, of_one_form, report_unused_form
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.cost import PACKET
from zerograph.passes.placement.experts import along_time, of_own_experts
from zerograph.passes.placement.problem import PlacementProblem, TensorId, placement_problem
from zerograph.passes.placement.solve import improve
from zerograph.passes.rules.discover import discover


def place(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Give every tensor an SBP and every operator a signature per mesh dimension."""
    problems: list[PlacementProblem] = []
    along_slices = _place_along_slices(module.graph, context)
    for _ in range(context.mesh.dims if along_slices is None else context.rank_dims):
        problem = replace(placement_problem(module.graph, context, problems), along_slices=along_slices)
        problems.append(_place_along(problem, context))
    if along_slices is not None:
        problems.append(along_slices)
    for node in module.graph.nodes:
        _record(node, problems)
    meta(module.graph.output_node())["needs"] = [
        tuple(
            broadcast if problem.is_time else problem.output_sbp(tensor, problem.sbp_of(tensor)) for problem in problems
        )
        for tensor in map(rules.output_of, output_nodes(module.graph))
    ]
    return module


def needed(node: fx.Node) -> list[tuple[fx.Node, NdSbp]]:
    """Return each tensor that the node reads, with the SBP in which the node needs it."""
    if node.op == "output":
        return list(zip(output_nodes(node.graph), meta(node)["needs"], strict=True))
    signatures: tuple[Signature, ...] | None = meta(node).get("signature")
    if signatures is None:
        return []
    return [
        (tensor, tuple(signature.inputs[index] for signature in signatures))
        for index, tensor in enumerate(rules.tensor_arguments(node))
    ]


def _place_along_slices(graph: fx.Graph, context: Context) -> PlacementProblem | None:
    """Place operators along all slices of ``config.virtual_ranks``, as if one rank computed them one after another.

    What varies between slices is placed alike along ranks and micro-batches, so the same sums are partial in any case.
    """
    if context.batch.slices is None:
        return None
    alone = context.along_slices()
    return _place_along(placement_problem(graph, alone, (), context.time_dim), alone)


def _place_along(problem: PlacementProblem, context: Context) -> PlacementProblem:
    splits_parameters = any(_splits_parameters(bucket, problem) for bucket in context.buckets)
    if problem.batch_is_split and not problem.is_time and splits_parameters:
        problem = replace(problem, output_sbps=_output_sbps(problem, context))
    free = _choose_greedily(problem, context)
    if problem.ranks == 1:
        # All placements are equal.
        return problem
    if problem.is_sequence:
        # Each operator keeps the sequence split where it can: chains would be solved one by one to the same end.
        report_unused_form(problem, context)
        _report_gathered_sequences(problem, free, context)
        return _computed_split(problem, free)
    improve(problem, free)
    if problem.total_cost() > _WORTH_SECOND_TRY:
        other = replace(problem, sbp={}, signature={})
        _choose_greedily(other, context, free, penalize_splits=True)
        improve(other, free)
        if other.total_cost() < problem.total_cost():
            problem = other
    problem = _computed_split(problem, free)
    if problem.is_time:
        _sink_below_loop(problem, free, context)
    return problem


def _computed_split(problem: PlacementProblem, free: dict[fx.Node, tuple[Signature, ...]]) -> PlacementProblem:
    for node in reversed(free):
        _split_if_readers_do(node, problem, free)
    return problem


def _splits_parameters(bucket: Bucket, problem: PlacementProblem) -> bool:
    """Return whether the user splits the bucket's parameters along this dimension."""
    return bucket.rows is not None and bucket.sbp[problem.dim] == Split(0)


def _output_sbps(problem: PlacementProblem, context: Context) -> dict[TensorId, Sbp]:
    """Return the SBP that each output would have if every rank held the parameters whole."""
    unsplit = tuple(
        replace(bucket, sbp=all_broadcast(context.mesh.dims)) if _splits_parameters(bucket, problem) else bucket
        for bucket in context.buckets
    )
    other = replace(problem, sbp={}, signature={})
    silent = replace(context.missing_rules, warn=lambda message: None)
    _choose_greedily(other, replace(context, buckets=unsplit, missing_rules=silent))
    outputs = list(map(rules.output_of, output_nodes(problem.graph)))
    return {tensor: other.sbp_of(tensor) for tensor in outputs}


def _sink_below_loop(problem: PlacementProblem, free: dict[fx.Node, tuple[Signature, ...]], context: Context) -> None:
    """Compute nodes once, on whole tensors, where an operand is complete only after the loop.

    Nodes that feed a gradient are left alone if they read parts of the batch: the backward pass would follow them.
    """
    trains: set[fx.Node] = set()
    for node in reversed(problem.graph.nodes):
        reduces = node.target is boxing and meta(node)["tensor"].kind == "gradient"
        if reduces or not trains.isdisjoint(node.users):
            trains.add(node)
    late: set[fx.Node] = set()
    for node in problem.graph.nodes:
        if node not in problem.signature:
            continue
        signature = problem.signature[node]
        operands = list(zip(problem.inputs(node), signature.inputs, strict=True))
        if any(_is_late(problem, tensor, need, late) for tensor, need in operands):
            late.add(node)
            reads_parts = any(isinstance(need, Split) for _, need in operands)
            # Slices may wait for sums over all of them.
            stays = node in trains or context.batch.slices is not None
            if node in free and not (stays and reads_parts):
                problem.choose(node, rules.all_broadcast(node))


def _is_late(problem: PlacementProblem, tensor: TensorId, need: Sbp, late: set[fx.Node]) -> bool:
    node = tensor[0]
    return node in late or (problem.leaves_loop(tensor, need) and node not in problem.batch_only)


# Cost from which a second placement is tried. A data-parallel step boxes a few sums and counts only.
_WORTH_SECOND_TRY = 16 * PACKET


def _choose_greedily(
    problem: PlacementProblem,
    context: Context,
    known_signatures: Mapping[fx.Node, tuple[Signature, ...]] = MappingProxyType({}),
    *,
    penalize_splits: bool = False,
) -> dict[fx.Node, tuple[Signature, ...]]:
    """Place every node in graph order; return the signatures of the operators that were free to choose.

    Args:
        problem: the problem, which is placed.
        context: the context of the passes.
        known_signatures: the result of an earlier call. Signatures of a node do not depend on earlier choices.
        penalize_splits: prefer to all-reduce a partial sum rather than to reduce-scatter it. A tensor that is split on
            every rank must often be gathered again soon, and makes gradients of whole parameters partial.
    """
    free: dict[fx.Node, tuple[Signature, ...]] = {}
    written = {node for node, _, _ in writes(problem.graph)}
    for node in problem.graph.nodes:
        if node.op == "placeholder":
            problem.sbp[node] = (_input_sbp(node, context)[problem.dim],)
        elif node.op == "get_attr":
            problem.sbp[node] = (broadcast,)
        elif node.target is boxing:
            problem.sbp[node] = (meta(node)["target_sbp"][problem.dim],)
        elif node.target is owner_update:
            problem.choose(node, meta(node)["signatures"][problem.dim])
        elif node in written:
            # State is written in the SBP that it is stored in.
            stored = problem.sbp[node.args[0]][0]
            problem.choose(node, Signature((stored, stored), (stored,)))
        elif node.op == "call_function" and node.target is not operator.getitem:
            free[node] = known_signatures[node] if node in known_signatures else _candidates(node, problem, context)
            costs = [problem.entry_cost(node, choice, penalize_splits=penalize_splits) for choice in free[node]]
            problem.choose(node, free[node][costs.index(min(costs))])
    return {node: signatures for node, signatures in free.items() if problem.values.get(node)}


def _input_sbp(node: fx.Node, context: Context) -> NdSbp:
    """Return the SBP in which an input of the graph is stored."""
    node_role = meta(node)["role"]
    if node_role.kind == "input":
        sbp = context.batch.inputs[int(node_role.name)]
        # An input is whole along time; ``split_micro_batches`` cuts it.
        return (*sbp[:-1], broadcast) if context.has_time else sbp
    if node_role.kind in ("bucket", "state") and node.meta["val"].dim():
        assert node_role.bucket is not None
        if node_role.entry is not None:
            update = context.updates[node_role.bucket]
            return (update.layouts.get(node_role.entry) or update.unused[node_role.entry]).sbp
        return context.bucket(node_role.bucket).sbp
    if node_role.kind == "accumulated":
        assert node_role.bucket is not None
        return context.bucket(node_role.bucket).gradient_sbp
    return all_broadcast(context.mesh.dims)


def _candidates(node: fx.Node, problem: PlacementProblem, context: Context) -> tuple[Signature, ...]:
    """Return the signatures that a node may have; without a rule, discovered ones or all broadcast."""
    if not rules.output_values(node):
        return (rules.all_broadcast(node),)
    if (signature := _along_slices(node, problem)) is not None:
        return (signature,)
    if (signature := along_time(node, problem)) is not None:
        return (signature,)
    signatures = problem.signatures(node)
    if signatures is not None:
        return of_own_experts(node, of_one_form(node, signatures, problem, context), problem, context)
    # Along time nothing can be gathered: ``hoist_batch_statistics`` refuses what needs it.
    if problem.ranks > 1 and not (problem.is_time and context.missing_rules.action == "gather"):
        if context.missing_rules.action == "discover":
            known = context.missing_rules.discovered
            signatures = discover(node, problem.ranks, problem.operands(node), problem.values[node], known)
            if signatures is not None:
                return signatures
        _report_missing_rule(node, problem, context)
    return (rules.all_broadcast(node),)


def _along_slices(node: fx.Node, problem: PlacementProblem) -> Signature | None:
    """Return the signature that a node must have for the same numbers on any number of ranks, with slices; else None.

    It is that along slices of a node that varies between them, or reads what does.
    """
    slices = problem.along_slices
    if slices is None:
        return None
    varies = slices.signature[node] != rules.all_broadcast(node)
    reads = any(slices.sbp_of(tensor) != broadcast for tensor in problem.inputs(node))
    if varies or reads:
        return slices.signature[node]
    # Kernels on a part of a whole tensor would be others on another number of ranks.
    is_whole = all(problem.sbp_of(tensor) == broadcast for tensor in problem.inputs(node))
    is_pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    if slices.ranks % problem.ranks and origin(node).phase != "update":
        # Parts of equal size would be taken for rows of the batch, of which ranks have unequal numbers.
        is_pointwise = False
    return rules.all_broadcast(node) if is_whole and not is_pointwise else None


def _split_if_readers_do(node: fx.Node, problem: PlacementProblem, free: dict[fx.Node, tuple[Signature, ...]]) -> None:
    """Compute a whole tensor split if every reader needs the same split of it, and that costs nothing."""
    if not isinstance(node.meta.get("val"), Tensor) or problem.sbp_of(rules.output_of(node)) != broadcast:
        return
    needs: set[Sbp] = set()
    for user in node.users:
        if user not in problem.signature:
            return
        needs.update(problem.needed_by(user, problem.signature[user], (node, 0)))
    if len(needs) != 1 or not isinstance(target := next(iter(needs)), Split):
        return
    for signature in free[node]:
        pairs = zip(problem.inputs(node), signature.inputs, strict=True)
        costless = all(wire_bytes(problem.sbp_of(tensor), sbp, 1, problem.ranks) == 0 for tensor, sbp in pairs)
        if costless and signature.outputs == (target,):
            problem.choose(node, signature)
            return


def _record(node: fx.Node, problems: list[PlacementProblem]) -> None:
    """Write the choices along every mesh dimension into the node's metadata."""
    if node in problems[0].signature:
        meta(node)["signature"] = tuple(problem.signature[node] for problem in problems)
    if isinstance(node.meta.get("val"), Tensor):
        meta(node)["sbp"] = tuple(problem.sbp_of(rules.output_of(node)) for problem in problems)
    elif isinstance(node.meta.get("val"), (list, tuple)) and node.op == "call_function":
        count = len(rules.output_values(node))
        meta(node)["sbp"] = tuple(tuple(problem.sbp[node][index] for problem in problems) for index in range(count))


def _report_gathered_sequences(
    problem: PlacementProblem, free: dict[fx.Node, tuple[Signature, ...]], context: Context
) -> None:
    """Report operators of which no signature keeps the sequence of an activation split, once for each user line."""
    lines: dict[str, dict[TensorId, list[fx.Node]]] = {}
    for node, signatures in free.items():
        for index, tensor in enumerate(problem.inputs(node) if node.target not in ATTENTION else ()):
            have, need = problem.sbp_of(tensor), problem.signature[node].inputs[index]
            dims = meta(tensor[0]).get("sequence_dims", ())
            is_sequence = tensor[1] < len(dims) and have == Split(dims[tensor[1]].get(problem.dim, -1))
            is_activation = problem.values[tensor[0]][tensor[1]].is_floating_point()
            gathers = need == broadcast and not any(signature.inputs[index] == have for signature in signatures)
            if is_sequence and is_activation and gathers:
                lines.setdefault(origin(node).source, {}).setdefault(tensor, []).append(node)
    for tensors in lines.values():
        nodes = [node for readers in tensors.values() for node in readers]
        operators = ", ".join(dict.fromkeys(str(node.target) for node in nodes))
        # A tensor is gathered once for all its readers.
        sent = sum(
            wire_bytes(problem.sbp_of(tensor), broadcast, problem.nbytes(tensor), problem.ranks) for tensor in tensors
        )
        message = (
            f"no rule says how {operators} may be split along the sequence: inputs are gathered, {sent:,.0f} bytes "
            f"per step\n{origin(nodes[0]).line}\n"
            "Each rank computes it for whole sequences. Pass a batch whose rows the ranks divide, which are then split "
            "there, or split the sequence over fewer ranks."
        )
        if context.missing_rules.action == "error":
            raise CaptureError(message)
        context.missing_rules.warn(message)


def _report_missing_rule(node: fx.Node, problem: PlacementProblem, context: Context) -> None:
    sent = sum(
        wire_bytes(problem.sbp_of((source, index)), broadcast, problem.nbytes((source, index)), problem.ranks)
        for source, index in problem.inputs(node)
    )
    where = origin(node).line
    if context.missing_rules.action == "error":
        raise CaptureError(
            f"no rule says how {node.target} may be split: to gather its inputs is {sent:,.0f} bytes per step\n"
            f"{where}\nGive it one with zg.register_rule, or set config.checks.on_missing_rule to 'gather' or "
            "'discover'."
        )
    tried = ", and it could not be tried on random data" if context.missing_rules.action == "discover" else ""
    context.missing_rules.warn(
        f"no rule says how {node.target} may be split{tried}: its inputs are gathered, {sent:,.0f} bytes per step\n"
        f"{where}\nGive it one with zg.register_rule."
    )
