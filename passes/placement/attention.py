"""Attention along a mesh dimension that splits the sequence: which form, and the signatures of that form.

``"ulysses"``  heads are split: queries, keys, values and results change between positions and heads by all-to-all
``"gather"``   queries are split: keys and values are gathered, and their gradients reduce-scattered
``"ring"``     queries, keys and values are split: keys and values travel around the ranks, in backward with their
               gradients; see ``lower/ring.py``
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from zerograph.errors import ConfigError
from zerograph.ir.metadata import meta, origin
from zerograph.ir.sbp import Signature, Split, broadcast, wire_bytes
from zerograph.ops.attention import ACCELERATED, BACKWARD, FORWARD, HEADS, POSITIONS
from zerograph.ops.flex_attention import flex_attention, flex_attention_backward
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.problem import PlacementProblem

_FORWARD = (FORWARD, flex_attention, *ACCELERATED)
BACKWARDS = (BACKWARD, flex_attention_backward, *ACCELERATED.values())
ATTENTION = (*_FORWARD, *BACKWARDS)
_SPLIT = {"ulysses": Split(HEADS), "gather": Split(POSITIONS)}


def of_one_form(
    node: fx.Node, signatures: tuple[Signature, ...], problem: PlacementProblem, context: Context
) -> tuple[Signature, ...]:
    """Return the signatures of attention in the form that is forced, or that costs least; all for other operators.

    Backward has the form of its forward.

    Raises:
        ConfigError: the form that is forced does not exist for this attention on so many ranks.
    """
    if not problem.is_sequence or node.target not in ATTENTION:
        return signatures
    arguments = rules.arguments(node)
    query, out = arguments["query"], node
    if problem.dim not in meta(query).get("sequence_dims", ({},))[0]:
        return signatures
    at = _query_index(node)
    if node.target in BACKWARDS:
        out = _forward_of(node)
        of_query, of_key, *_ = problem.signature[out].inputs
        same = tuple(one for one in signatures if one.inputs[at] == of_query)
        return _in_a_ring(node, same) if of_key == Split(POSITIONS) else same
    forms = {form: [one for one in signatures if one.inputs[at] == split] for form, split in _SPLIT.items()}
    if node.target is FORWARD and _divides_keys(node, problem):
        forms["ring"] = list(_in_a_ring(node, forms["gather"]))
    if context.batch.attention != "auto":
        if not forms.get(context.batch.attention):
            raise ConfigError(_not_possible(node, query, context.batch.attention, problem.ranks))
        return tuple(forms[context.batch.attention])
    forms.pop("ring", None)
    possible = [(_cost(node, found[0], problem), form) for form, found in forms.items() if found]
    return tuple(forms[min(possible)[1]]) if possible else signatures


def report_unused_form(problem: PlacementProblem, context: Context) -> None:
    """Warn if a form is forced, but the step has no attention that could have it."""
    form = context.batch.attention
    queries = (rules.arguments(node)["query"] for node in problem.signature if node.target in ATTENTION)
    if form in ("auto", "gather") or any(
        problem.dim in meta(query).get("sequence_dims", ({},))[0] for query in queries
    ):
        return
    context.missing_rules.warn(
        f"config.mesh.context_parallel_method = {form!r} has no effect: no attention of this step is one operator\n"
        "Torch computes F.scaled_dot_product_attention as products if it has dropout, a mask of three dimensions, or a "
        "mask with a gradient. Ranks that split the sequence then gather keys and values, as 'gather' does."
    )


def _query_index(node: fx.Node) -> int:
    """Return the index of the queries among the node's tensors. Keys and values follow, which may be the same node."""
    if node.target in BACKWARDS:
        return 2 if rules.arguments(node).get("grad_lse") is not None else 1
    return 0


def _in_a_ring(node: fx.Node, gathered: Iterable[Signature]) -> tuple[Signature, ...]:
    """Return signatures of gathered attention with keys, values and their gradients split along positions."""
    at, split, forward = _query_index(node), Split(POSITIONS), node.target is FORWARD
    return tuple(
        Signature(
            tuple(split if index in (at + 1, at + 2) else sbp for index, sbp in enumerate(signature.inputs)),
            tuple(sbp if forward or index == 0 else split for index, sbp in enumerate(signature.outputs)),
        )
        for signature in gathered
    )


def _divides_keys(node: fx.Node, problem: PlacementProblem) -> bool:
    """Return whether ranks have equally many keys, and under a causal mask the queries of the same positions."""
    arguments = rules.arguments(node)
    queries, keys = (arguments[name].meta["val"].shape[POSITIONS] for name in ("query", "key"))
    if not isinstance(keys, int) or keys % problem.ranks or len(meta(arguments["query"])["sequence_dims"][0]) > 1:
        return False
    return queries == keys or not arguments["is_causal"]


def _forward_of(node: fx.Node) -> fx.Node:
    """Return the forward of a backward: that of the same queries."""
    arguments = rules.arguments(node)
    users: Sequence[fx.Node] = list(arguments["query"].users)
    return next(user for user in users if user.target in _FORWARD and rules.arguments(user)["key"] is arguments["key"])


def _cost(node: fx.Node, signature: Signature, problem: PlacementProblem) -> float:
    """Return the bytes that each rank sends in forward, and those of tensors that it gathers again for backward."""
    arguments, total = rules.arguments(node), 0.0
    for tensor, need in zip(rules.tensor_arguments(node), signature.inputs, strict=True):
        if tensor in (arguments["query"], arguments["key"], arguments["value"]):
            nbytes = problem.nbytes(rules.output_of(tensor))
            total += wire_bytes(Split(POSITIONS), need, nbytes, problem.ranks)
            total += nbytes * (problem.ranks - 1) / problem.ranks if need == broadcast else 0
    return total + wire_bytes(signature.outputs[0], Split(POSITIONS), problem.nbytes((node, 0)), problem.ranks)


def _not_possible(node: fx.Node, query: fx.Node, form: str, ranks: int) -> str:
    _, heads, positions, _ = query.meta["val"].shape
    _, key_heads, keys, _ = rules.arguments(node)["key"].meta["val"].shape
    shown = f"{heads} heads" if heads == key_heads else f"{heads} heads of queries and {key_heads} of keys"
    if form == "ulysses":
        problem = f"the attention has {shown}, which {ranks} ranks do not divide"
    elif node.target is flex_attention:
        problem = "FlexAttention splits heads only"
    elif node.target in ACCELERATED:
        problem = "torch's kernels for accelerators split heads only"
    elif form == "ring":
        problem = (
            f"the attention has {positions} queries and {keys} keys. A ring needs numbers that {ranks} ranks divide, "
            "equal ones under a causal mask, and sequences that one dimension of the placement splits"
        )
    else:
        problem = f"the attention has {positions} queries, which {ranks} ranks do not divide"
    return (
        f"config.mesh.context_parallel_method = {form!r}: {problem}\n{origin(node).line}\n"
        "Set it to 'auto', which uses another form here, or split the sequence over fewer ranks."
    )
