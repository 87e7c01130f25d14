"""The cost model of placement, all of it: what one mesh dimension's choice of SBPs costs per step.

Bytes sent decide, counted in packets, and one more for each collective: what is tiny costs its latency. A byte that
is only cut away or copied on the way counts a thousandth, so that of two choices that send the same the one wins that
touches less memory; and a split that no input asks for counts next to nothing, so that what could stay whole for free
stays whole (what comes next may need it whole, and a slice is free).
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
    """Of giving a tensor of ``nbytes`` to readers that need it so: those with the same need share one boxing."""
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
    """Of a signature by itself."""
    if any(isinstance(sbp, Split) for sbp in signature.inputs):
        return 0.0
    return INVENTED * sum(isinstance(sbp, Split) for sbp in signature.outputs)
