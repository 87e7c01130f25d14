"""What OneFlow's scripts may say and what means nothing here: said once, never silently dropped."""

from __future__ import annotations

import warnings

from zerograph.runtime.job.process_group import rank

_said: set[str] = set()


def without_effect(call: str, why: str) -> None:
    """Warn, once in a process and on rank 0 only, that ``call`` changes nothing, and why."""
    if call not in _said:
        _said.add(call)
        if rank() == 0:
            warnings.warn(f"{call} has no effect in zerograph: {why}", stacklevel=3)
