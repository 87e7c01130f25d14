"""verify: what must hold after every pass, checked in one walk over the nodes."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor, fx

from zerograph.errors import VerificationError
from zerograph.ir.metadata import meta, origin
from zerograph.ir.sbp import PartialSum, Signature, show
from zerograph.ir.step_graph import placeholders, writes
from zerograph.passes import rules

# Of each node what its signature was last compared with.
Seen = dict[fx.Node, tuple[Any, ...]]


def verify(module: fx.GraphModule, after: str, seen: Seen, *, placed: bool, boxed: bool) -> None:
    """Raise if the graph breaks an invariant that holds from ``place`` (``placed``) or ``box`` (``boxed``) on.

    Args:
        seen: empty before the first pass over a graph, then as the last call left it: most nodes are as they were.

    Raises:
        VerificationError: naming the pass, the node and the user's line.
    """
    made: set[fx.Node] = set()
    changed: set[fx.Node] = set()
    for node in module.graph.nodes:
        inputs, known = node.all_input_nodes, meta(node)
        if not made.issuperset(inputs):
            missing = next(given for given in inputs if given not in made)
            _fail(after, node, f"reads {missing.name}, which is not made yet")
        made.add(node)
        if placed and "sbp" not in known and "local" not in known and isinstance(known.get("val"), Tensor):
            _fail(after, node, "has no SBP")
        if not boxed:
            continue
        signatures = known.get("signature", ())
        now = node.args, node.kwargs, signatures, known.get("sbp"), known.get("val")
        before = seen.get(node)
        if before is None or not all(map(is_, now, before)):
            seen[node] = now
            changed.add(node)
        if node in changed or not changed.isdisjoint(inputs):
            for dim, signature in enumerate(signatures):
                _check_signature(after, node, dim, signature)
    if placed:
        _check_state(module.graph, after)


def _check_signature(after: str, node: fx.Node, dim: int, signature: Signature) -> None:
    inputs = rules.tensor_arguments(node)
    for given, wanted in zip(inputs, signature.inputs, strict=True):
        if meta(given)["sbp"][dim] != wanted:
            _fail(after, node, f"reads {given.name} as {wanted}, but it is {show(meta(given)['sbp'])}")
    if isinstance(node.meta["val"], Tensor) and meta(node)["sbp"][dim] != signature.outputs[0]:
        _fail(after, node, f"is {show(meta(node)['sbp'])}, but its signature yields {signature.outputs[0]}")
    reads_partial = any(isinstance(sbp, PartialSum) for sbp in signature.inputs)
    if reads_partial and not all(isinstance(sbp, PartialSum) for sbp in signature.outputs):
        _fail(after, node, "reads a partial sum, but is no reduction")


def _check_state(graph: fx.Graph, after: str) -> None:
    for node, state, new in writes(graph):
        if meta(state)["sbp"] != meta(node)["sbp"] or state.meta["val"].shape != new.meta["val"].shape:
            _fail(after, node, f"writes {state.name}, which must keep the SBP and shape that it entered with")
    for node in placeholders(graph):
        if "role" not in node.meta:
            _fail(after, node, "is an input without a role")


def _fail(after: str, node: fx.Node, what: str) -> None:
    where = origin(node)
    raise VerificationError(f"after {after}: {node.format_node()} {what}\n  {where.source}   {where.code}")
