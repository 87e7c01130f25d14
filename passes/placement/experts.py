"""Experts along a mesh dimension that splits them: ranks multiply by their own, and gather or exchange tokens.

Tokens are gathered before the experts, and results reduce-scattered after them; or both are exchanged by all-to-all,
see ``ops/dispatch.py``, where that sends fewer bytes. In a loop over micro-batches the operators of ``ops/dispatch.py``
gather and reduce inside.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zerograph.ir.sbp import Signature, Split, broadcast
from zerograph.ops.dispatch import COMBINE, DISPATCH, GATHER_IDS, capacity
from zerograph.ops.experts import EXPERT_MM, EXPERT_MM_SUMMED
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.problem import PlacementProblem

_EXCHANGE = Signature((Split(0), broadcast), (Split(0),))
_SENDING: dict[Any, Signature] = {
    DISPATCH: _EXCHANGE,
    COMBINE: _EXCHANGE,
    GATHER_IDS: Signature((Split(0),), (broadcast,)),
}
# Along time each micro-batch has its own tokens. Rules would see those of one rank beside those of all.
_ALONG_TIME: dict[Any, Signature] = {
    DISPATCH: Signature((Split(0), Split(0)), (Split(1),)),
    COMBINE: Signature((Split(1), Split(0)), (Split(0),)),
    GATHER_IDS: Signature((Split(0),), (Split(0),)),
}


def of_own_experts(
    node: fx.Node, signatures: tuple[Signature, ...], problem: PlacementProblem, context: Context
) -> tuple[Signature, ...]:
    """Return the signatures in which ranks multiply by the experts that they store, where the user splits experts."""
    if node.target in _SENDING:
        return (_SENDING[node.target],) if _sends_tokens(node, problem, context) else signatures
    if node.target not in (EXPERT_MM, EXPERT_MM_SUMMED) or problem.sbp_of(problem.inputs(node)[1]) != Split(0):
        return signatures
    return tuple(one for one in signatures if one.inputs[1] == Split(0)) or signatures


def along_time(node: fx.Node, problem: PlacementProblem) -> Signature | None:
    """Return the signature along time of a node between tokens and experts; None for any other node."""
    return _ALONG_TIME.get(node.target) if problem.is_time else None


def exchanged_along(node: fx.Node, signatures: tuple[Signature, ...]) -> int | None:
    """Return the mesh dimension along which a node sends tokens or their experts; None for any other node."""
    sending = _SENDING.get(node.target)
    return signatures.index(sending) if sending in signatures else None


def capacity_of(node: fx.Node, tokens: int, ranks: int, context: Context) -> int:
    """Return the rows that a rank sends each other rank in the first round.

    Args:
        node: the node that exchanges.
        tokens: number of tokens of a rank.
        ranks: number of ranks.
        context: the context of the passes.
    """
    arguments, factor = rules.arguments(node), context.batch.expert_capacity
    assert factor is not None
    return capacity(tokens, arguments["ids"].meta["val"].shape[1], arguments["experts"], ranks, factor)


def _sends_tokens(node: fx.Node, problem: PlacementProblem, context: Context) -> bool:
    """Return whether the node sends tokens, or their experts, between ranks that split the experts.

    It does if an exchange of tokens, with the experts of all tokens on all ranks, sends less than a gather; and in
    micro-batches.
    """
    splits_experts = any(bucket.rows is not None and bucket.sbp[problem.dim] == Split(0) for bucket in context.buckets)
    # Rules along later mesh dimensions would see tokens of one rank and rows for those of all.
    is_last = problem.dim == context.mesh.dims - 1 - context.has_time and not problem.is_time
    if not splits_experts or not problem.batch_is_split or not is_last:
        return False
    if context.has_time:
        return True
    if node.target is GATHER_IDS or context.batch.expert_capacity is None:
        return False
    (rows, ids), ranks = (problem.values[source][index] for source, index in problem.inputs(node)), problem.ranks
    groups = rows.shape[0] if node.target is COMBINE else rules.arguments(node)["groups"]
    if groups != ranks or not isinstance(ids.shape[0], int) or ids.shape[0] % ranks:
        return False
    tokens = ids.shape[0] // ranks
    # The experts of a token, and their shares.
    of_router = ids.shape[1] * (ids.itemsize + rows.itemsize)
    width = rows.shape[-1] * rows.itemsize
    return capacity_of(node, tokens, ranks, context) * width + tokens * of_router < tokens * width
