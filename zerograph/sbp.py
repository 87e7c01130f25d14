"""SBP: what each rank holds of a global tensor, one of ``broadcast``, ``split(dim)`` and ``partial_sum`` per mesh
dimension. Implemented in :mod:`zerograph.ir.sbp`.
"""

from zerograph.ir.sbp import Broadcast, NdSbp, PartialSum, Sbp, Split, broadcast, partial_sum, split

__all__ = ["Broadcast", "NdSbp", "PartialSum", "Sbp", "Split", "broadcast", "partial_sum", "split"]
