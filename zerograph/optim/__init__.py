"""Trace an optimizer's update of one parameter as a small graph (``program``).

The update is traced on a sample (``sampling``), checked to be elementwise and to read no other parameter, and compared
with the updates of other parameters.
"""

from zerograph.optim.program import Programs, check_separate, programs_of, trace_update

__all__ = ["Programs", "check_separate", "programs_of", "trace_update"]
