"""verify: check the invariants after every pass, in one walk over the nodes."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor, fx

from zerograph.errors import VerificationError
from zerograph.ir.metadata import boxing_of, meta, origin
from zerograph.ir.sbp import PartialSum, Signature, show
from zerograph.ir.step_graph import placeholders, writes
from zerograph.passes import rules

# For each node the arguments and metadata that its signature was last checked with.
Seen = dict[fx.Node, tuple[Any, ...]]


def verify(module: fx.GraphModule, after: str, seen: Seen, *, placed: bool, boxed: bool) -> None:
    """Raise if the graph breaks an invariant.

    Args:
        module: the graph.
        after: name of the pass that ran last, for the message.
        seen: empty before the first pass over a graph, then as the last call left it. Unchanged nodes are not checked
            again.
        placed: whether the invariants that hold from ``place`` on apply.
        boxed: whether the invariants that hold from ``box`` on apply.

    Raises:
        VerificationError: an invariant is broken; the message names the pass, the node and the user's line.
    """
    computed: set[fx.Node] = set()
    changed: set[fx.Node] = set()
    # This loop visits every node after every pass: it calls nothing that it can do without.
    for node in module.graph.nodes:
        sources, node_meta = node.all_input_nodes, node.meta
        if not computed.issuperset(sources):
            missing = next(source for source in sources if source not in computed)
            _fail(after, node, f"reads {missing.name}, which is computed later")
        computed.add(node)
        if "boxing" in node_meta:
            _check_format(after, node)
        if placed and "sbp" not in node_meta and "local" not in node_meta and isinstance(node_meta.get("val"), Tensor):
            _fail(after, node, "has no SBP")
        if not boxed:
            continue
        signatures = node_meta.get("signature", ())
        state = node.args, node.kwargs, signatures, node_meta.get("sbp"), node_meta.get("val")
        last = seen.get(node)
        if last is None or not all(map(is_, state, last)):
            seen[node] = state
            changed.add(node)
        elif not signatures or changed.isdisjoint(sources):
            continue
        for dim, signature in enumerate(signatures):
            _check_signature(after, node, dim, signature)
    if placed:
        _check_state(module.graph, after)


def _check_format(after: str, node: fx.Node) -> None:
    boxing = boxing_of(node)
    if boxing is not None and boxing.format and boxing.tensor.kind == "value":
        _fail(after, node, f"sends {boxing.tensor} as {boxing.format}: only parameters and gradients may be lossy")


def _check_signature(after: str, node: fx.Node, dim: int, signature: Signature) -> None:
    inputs = rules.tensor_arguments(node)
    for source, wanted in zip(inputs, signature.inputs, strict=True):
        if meta(source)["sbp"][dim] != wanted:
            _fail(after, node, f"reads {source.name} as {wanted}, but it is {show(meta(source)['sbp'])}")
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


def _fail(after: str, node: fx.Node, problem: str) -> None:
    raise VerificationError(f"after {after}: {node.format_node()} {problem}\n{origin(node).line}")
