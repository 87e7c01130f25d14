"""Read what a launcher puts into the environment; an error names the variable and its value."""

from __future__ import annotations

import contextlib
import os

from zerograph.errors import CommunicationError


def number_of(name: str, default: int | None = None, least: int = 0, most: int | None = None) -> int:
    """Return the whole number that an environment variable holds; ``default`` if it is not set.

    Raises:
        CommunicationError: it is not set and there is no default, or it is no such number.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    with contextlib.suppress(ValueError):
        number = int(text or "")
        if number >= least and (most is None or number <= most):
            return number
    wanted = f"a whole number from {least} " + ("on" if most is None else f"to {most}")
    shown = "is not set" if text is None else f"is {text!r:.60}"
    raise CommunicationError(f"the environment variable {name} {shown}: it must be {wanted}, as torchrun sets it")


def check_launch() -> None:
    """Check all that the environment says of this process's place in a job.

    Raises:
        CommunicationError: a variable is not set, or is not the number that it must be.
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
    """Return this process's number on its machine, 0 if no launcher says it.

    Raises:
        CommunicationError: it is no number. Some launchers say -1 where there is one process.
    """
    return number_of("LOCAL_RANK", 0, least=-1)
