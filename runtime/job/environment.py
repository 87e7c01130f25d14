"""Read the environment variables that a launcher sets; an error names the variable and its value."""

from __future__ import annotations

import contextlib
import os

from zerograph.errors import CommunicationError


def number_of(name: str, default: int | None = None, least: int = 0, most: int | None = None) -> int:
    """Return an environment variable as a whole number.

    Args:
        name: the variable.
        default: returned if it is not set; None: it must be set.
        least, most: the range of allowed numbers.

    Raises:
        CommunicationError: it is not set and has no default, or is not a number in the range.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    with contextlib.suppress(ValueError):
        number = int(text or "")
        if number >= least and (most is None or number <= most):
            return number
    allowed = f"a whole number from {least} " + ("on" if most is None else f"to {most}")
    shown = "is not set" if text is None else f"is {text!r:.60}"
    raise CommunicationError(f"the environment variable {name} {shown}: it must be {allowed}, as torchrun sets it")


def check_launch() -> None:
    """Check the variables that give this process's place in a job.

    Raises:
        CommunicationError: a variable is not set, or not a number in its range.
    """
    missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise CommunicationError(
            f"the environment names a distributed job, but {', '.join(missing)} is not set\n"
            "Start with torchrun, or unset RANK and WORLD_SIZE to run as one process."
        )
    number_of("RANK", most=number_of("WORLD_SIZE", least=1) - 1)
    number_of("MASTER_PORT", most=2**16 - 1)
    number_of("LOCAL_WORLD_SIZE", 1, least=1)
    number_of("TORCHELASTIC_RESTART_COUNT", 0)
    local_rank()


def local_rank() -> int:
    """Return this process's number on its machine; 0 if LOCAL_RANK is not set.

    Raises:
        CommunicationError: it is not a number.
    """
    # Some launchers set -1 if there is one process.
    return number_of("LOCAL_RANK", 0, least=-1)
