"""SBP of global tensors: ``broadcast``, ``split(dim)`` or ``partial_sum`` for each mesh dimension.

Implemented in :mod:`zerograph.ir.sbp`.
"""

from zerograph.ir.sbp import Broadcast, NdSbp, PartialSum, Sbp, Split, broadcast, partial_sum, split

__all__ = ["Broadcast", "NdSbp", "PartialSum", "Sbp", "Split", "broadcast", "partial_sum", "split"]
