"""verify: check the invariants of a graph in one walk over its nodes."""

from __future__ import annotations

from torch import Tensor, fx

from zerograph.errors import VerificationError
from zerograph.ir.metadata import boxing_of, meta, origin
from zerograph.ir.sbp import PartialSum, Signature, show
from zerograph.ir.step_graph import placeholders, writes
from zerograph.passes import rules


def verify(module: fx.GraphModule, after: str, *, placed: bool, boxed: bool) -> None:
    """Raise if the graph breaks an invariant.

    Args:
        module: the graph.
        after: name of the pass that ran last, for the message.
        placed: whether the invariants that hold from ``place`` on apply.
        boxed: whether the invariants that hold from ``box`` on apply.

    Raises:
        VerificationError: an invariant is broken; the message names the pass, the node and the user's line.
    """
    computed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if missing := [source for source in node.all_input_nodes if source not in computed]:
            _fail(after, node, f"reads {missing[0].name}, which is computed later")
        computed.add(node)
        if "boxing" in node.meta:
            _check_format(after, node)
        if placed and "sbp" not in node.meta and "local" not in node.meta and isinstance(node.meta.get("val"), Tensor):
            _fail(after, node, "has no SBP")
        for dim, signature in enumerate(node.meta.get("signature", ()) if boxed else ()):
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
