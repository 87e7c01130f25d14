"""The cost model of placement: the cost per step of one mesh dimension's SBPs.

The unit is a byte sent. Bytes are counted in whole packets, plus one packet of latency per collective. A byte that is
only sliced or copied costs a thousandth, so of two choices that send the same the one that touches less memory wins. A
split that no input has costs next to nothing, so a tensor that can stay whole for free stays whole: a later reader may
need it whole, and slicing it is free.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from zerograph.ir.sbp import Sbp, Signature, Split, wire_bytes

PACKET = 4096
COPIED = 1e-3
INVENTED = 1e-6


def boxing_cost(have: Sbp, needs: Iterable[Sbp], nbytes: int, ranks: int) -> float:
    """Return the cost of boxing a tensor for its readers; readers with the same need share one boxing.

    Args:
        have: the tensor's SBP.
        needs: the SBPs that readers need.
        nbytes: bytes of the tensor that the ranks hold together.
        ranks: number of ranks along the mesh dimension.
    """
    total = 0.0
    for need in needs if isinstance(needs, tuple) and len(needs) == 1 else set(needs):
        if need is not have and need != have:
            total += _change_cost(have, need, nbytes, ranks)
    return total


@functools.lru_cache(maxsize=65536)
def _change_cost(have: Sbp, need: Sbp, nbytes: int, ranks: int) -> float:
    sent = wire_bytes(have, need, nbytes, ranks)
    packets = 1 + math.ceil(sent / PACKET) if 0 < sent < math.inf else sent
    return PACKET * packets + COPIED * nbytes


def signature_cost(signature: Signature) -> float:
    """Return the cost of a signature by itself, without boxing."""
    if any(isinstance(sbp, Split) for sbp in signature.inputs):
        return 0.0
    return INVENTED * sum(isinstance(sbp, Split) for sbp in signature.outputs)
