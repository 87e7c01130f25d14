"""Attention along a mesh dimension that splits the sequence: which form, and the signatures of that form.

``"ulysses"``  heads are split: queries, keys, values and results change between positions and heads by all-to-all
``"gather"``   queries are split: keys and values are gathered, and their gradients reduce-scattered
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zerograph.errors import ConfigError
from zerograph.ir.attention import BACKWARD, FORWARD, HEADS, POSITIONS
from zerograph.ir.flex_attention import flex_attention, flex_attention_backward
from zerograph.ir.metadata import meta, origin
from zerograph.ir.sbp import Signature, Split, broadcast, wire_bytes
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.problem import PlacementProblem

_BACKWARD = (BACKWARD, flex_attention_backward)
_SPLIT = {"ulysses": Split(HEADS), "gather": Split(POSITIONS)}


def of_one_form(
    node: fx.Node, signatures: tuple[Signature, ...], problem: PlacementProblem, context: Context
) -> tuple[Signature, ...]:
    """Return the signatures of attention in the form that is forced, or that costs least; all for other operators.

    Backward has the form of its forward.

    Raises:
        ConfigError: the form that is forced does not exist for this attention on so many ranks.
    """
    if not problem.is_sequence or node.target not in (FORWARD, flex_attention, *_BACKWARD):
        return signatures
    arguments = rules.arguments(node)
    query, out = arguments["query"], node
    if problem.dim not in meta(query).get("sequence_dims", ({},))[0]:
        return signatures
    at = rules.tensor_arguments(node).index(query)
    if node.target in _BACKWARD:
        out = _forward_of(node)
        index = rules.tensor_arguments(out).index(rules.arguments(out)["query"])
        same = problem.signature[out].inputs[index]
        return tuple(one for one in signatures if one.inputs[at] == same)
    forms = {form: [one for one in signatures if one.inputs[at] == split] for form, split in _SPLIT.items()}
    if context.batch.attention != "auto":
        if not forms[context.batch.attention]:
            raise ConfigError(_not_possible(node, query, context.batch.attention, problem.ranks))
        return tuple(forms[context.batch.attention])
    possible = [(_cost(node, found[0], problem), form) for form, found in forms.items() if found]
    return tuple(forms[min(possible)[1]]) if possible else signatures


def _forward_of(node: fx.Node) -> fx.Node:
    """Return the forward of a backward: that of the same queries."""
    arguments = rules.arguments(node)
    users: Sequence[fx.Node] = list(arguments["query"].users)
    return next(
        user
        for user in users
        if user.target in (FORWARD, flex_attention) and rules.arguments(user)["key"] is arguments["key"]
    )


def _cost(node: fx.Node, signature: Signature, problem: PlacementProblem) -> float:
    """Return the bytes that each rank sends in forward, and those of gathered tensors that it holds for backward."""
    arguments, total = rules.arguments(node), 0.0
    for tensor, need in zip(rules.tensor_arguments(node), signature.inputs, strict=True):
        if tensor in (arguments["query"], arguments["key"], arguments["value"]):
            nbytes = problem.nbytes(problem.tensor_of(tensor))
            total += wire_bytes(Split(POSITIONS), need, nbytes, problem.ranks)
            total += nbytes * (problem.ranks - 1) / problem.ranks if need == broadcast else 0
    return total + wire_bytes(signature.outputs[0], Split(POSITIONS), problem.nbytes((node, 0)), problem.ranks)


def _not_possible(node: fx.Node, query: fx.Node, form: str, ranks: int) -> str:
    where = origin(node)
    _, heads, positions, _ = query.meta["val"].shape
    key_heads = rules.arguments(node)["key"].meta["val"].shape[HEADS]
    shown = f"{heads} heads" if heads == key_heads else f"{heads} heads of queries and {key_heads} of keys"
    problem = (
        f"the attention has {shown}, which {ranks} ranks do not divide"
        if form == "ulysses"
        else f"the attention has {positions} queries, which {ranks} ranks do not divide"
    )
    return (
        f"config.attention = {form!r}: {problem}\n  {where.source}   {where.code}\n"
        "Set it to 'auto', which uses another form here, or split the sequence over fewer ranks."
    )
