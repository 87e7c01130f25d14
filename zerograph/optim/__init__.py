"""capture, the optimizer's part: one parameter's update as a small graph (``program``).

Traced on a sample (``sampling``), proved to be elementwise or not and to read no other parameter (``proofs``), and
compared with other parameters' (``keying``).
"""

from zerograph.optim.known import Programs, programs_of
from zerograph.optim.program import refuse_unsupported, trace_update
from zerograph.optim.proofs import check_separate

__all__ = [
    "Programs",
    "check_separate",
    "programs_of",
    "refuse_unsupported",
    "trace_update",
]
