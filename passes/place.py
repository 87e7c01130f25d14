"""place: every tensor gets an SBP, every operator the cheapest of its signatures.

Greedy in graph order, by bytes moved. Whole tensors that only split consumers read (constants, expansions of
scalars) are then made split in the first place, last to first, so that no rank computes what it throws away.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from zerograph.passes import rules
from zerograph.passes.boxing import boxing
from zerograph.passes.context import Context
from zerograph.passes.deal import dealt_update
from zerograph.passes.rules import Signature
from zerograph.sbp import WHOLE, NdSbp, PartialSum, Sbp, Split, wire_bytes
from zerograph.step_graph import nbytes, origin, output_nodes, role, writes


def place(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Every tensor has an SBP, every operator a signature in ``node.meta["signature"]``."""
    graph = module.graph
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["sbp"] = _at_rest(node, context)
        elif node.op == "get_attr":
            node.meta["sbp"] = WHOLE
        elif node.op == "call_function":
            _choose(node, context)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function":
            _pull_split(node, context)
    _settle_boundaries(graph)
    return module


def needed(node: fx.Node) -> list[tuple[fx.Node, NdSbp]]:
    """Each tensor that the node reads, with the SBP in which it needs it."""
    if node.op == "output":
        return list(zip(output_nodes(node.graph), node.meta["needs"], strict=True))
    signature: Signature | None = node.meta.get("signature")
    if signature is None:
        return []
    return [(given, (sbp,)) for given, sbp in zip(rules.tensor_arguments(node), signature.inputs, strict=True)]


def _at_rest(node: fx.Node, context: Context) -> NdSbp:
    found = role(node)
    assert found is not None
    if found.kind == "input":
        return context.inputs[int(found.name)]
    if found.kind in ("bucket", "state") and node.meta["val"].dim():
        name, _, state = found.name.partition(".")
        if state:
            return context.updates[name].layouts[state].sbp
        return next(bucket.sbp for bucket in context.buckets if bucket.name == name)
    return WHOLE


def _choose(node: fx.Node, context: Context) -> None:
    if node.target is boxing:
        node.meta["sbp"] = node.meta["target_sbp"]
        return
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        node.meta["sbp"] = source.meta["sbp"][_tensor_index(source.meta["val"], index)]
        return
    if node.target is dealt_update:
        _assign(node, node.meta["signature"])
        return
    candidates = _candidates(node, context)
    _assign(node, min(candidates, key=lambda signature: _cost(node, signature, context.ranks)))


def _candidates(node: fx.Node, context: Context) -> tuple[Signature, ...]:
    found = rules.of_node(node, context.ranks)
    if found is not None:
        return found
    whole = rules.all_broadcast(node)
    if context.ranks > 1 and rules.output_values(node):
        _warn_of_missing_rule(node, whole, context)
    return (whole,)


def _cost(node: fx.Node, signature: Signature, ranks: int) -> tuple[float, float, int]:
    """Bytes moved, then bytes sliced away, then outputs split although no input is."""
    moved = sliced = 0.0
    for given, wanted in zip(rules.tensor_arguments(node), signature.inputs, strict=True):
        have: NdSbp = given.meta["sbp"]
        size = nbytes(given.meta["val"])
        moved += wire_bytes(have, (wanted,), size, ranks)
        sliced += size if have != (wanted,) else 0
    # A whole output from whole inputs beats a split one: what comes next may need it whole, and a slice is free.
    reads_split = any(isinstance(sbp, Split) for sbp in signature.inputs)
    invented = 0 if reads_split else sum(isinstance(sbp, Split) for sbp in signature.outputs)
    return moved, sliced, invented


def _assign(node: fx.Node, signature: Signature) -> None:
    node.meta["signature"] = signature
    outputs: list[NdSbp] = [(sbp,) for sbp in signature.outputs]
    if isinstance(node.meta["val"], Tensor):
        node.meta["sbp"] = outputs[0]
    elif isinstance(node.meta["val"], (list, tuple)):
        node.meta["sbp"] = tuple(outputs)


def _tensor_index(values: Any, index: int) -> int:
    """Which of the tensors among ``values`` stands at ``index``: what was not computed has no SBP."""
    return sum(isinstance(value, Tensor) for value in values[:index])


def _pull_split(node: fx.Node, context: Context) -> None:
    """Compute split what is computed whole although every reader wants the same split of it."""
    if node.meta.get("sbp") != WHOLE or not isinstance(node.meta.get("val"), Tensor) or "signature" not in node.meta:
        return
    wanted: set[Sbp] = set()
    for user in node.users:
        if user.op == "output" or user.target is boxing or "signature" not in user.meta:
            return
        wanted |= {sbp[0] for given, sbp in needed(user) if given is node}
    if len(wanted) != 1 or not isinstance(target := next(iter(wanted)), Split):
        return
    for signature in _candidates(node, context):
        free = all(
            wire_bytes(given.meta["sbp"], (sbp,), 1, context.ranks) == 0
            for given, sbp in zip(rules.tensor_arguments(node), signature.inputs, strict=True)
        )
        if free and signature.outputs == (target,):
            _assign(node, signature)
            return


def _settle_boundaries(graph: fx.Graph) -> None:
    """State is written in the SBP that it rests in; what the user gets back is whole or split, never partial."""
    for node, target, _ in writes(graph):
        rest = target.meta["sbp"][0]
        node.meta["signature"] = Signature((rest, rest), (rest,))
        node.meta["sbp"] = (rest,)
    output = graph.output_node()
    output.meta["needs"] = [
        WHOLE if isinstance(node.meta["sbp"][0], PartialSum) else node.meta["sbp"] for node in output_nodes(graph)
    ]


def _warn_of_missing_rule(node: fx.Node, whole: Signature, context: Context) -> None:
    gathered = sum(
        wire_bytes(given.meta["sbp"], (sbp,), nbytes(given.meta["val"]), context.ranks)
        for given, sbp in zip(rules.tensor_arguments(node), whole.inputs, strict=True)
    )
    where = origin(node)
    context.warn(
        f"no rule says how {node.target} may be split: its inputs are gathered, {gathered:,.0f} bytes per step\n"
        f"  {where.source}   {where.code}"
    )
