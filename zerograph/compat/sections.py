"""Reading sections of a configuration: unknown keys are refused, and what means nothing here is said once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from zerograph.compat.notices import say
from zerograph.errors import ConfigError
from zerograph.ir.buckets import MOST_BYTES


def section(value: Any, name: str, known: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a section whose keys are all known.

    Raises:
        ConfigError: not a dict, or a key that does not exist; the message names it and the choices.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r:.60}: give a dict")
    choices = tuple(known)
    for key in value:
        if key not in choices:
            near = difflib.get_close_matches(str(key), choices, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name} has no key {key!r}{hint}\nKeys: {', '.join(choices)}.")
    return dict(value)


def number(value: Any, name: str, low: float = 0) -> float:
    """Return a number from JSON, or from a string such as ``"5e8"``.

    Raises:
        ConfigError: no finite number, or one below ``low``.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not low <= found < math.inf:
        raise ConfigError(f"{name} = {value!r}: give a number, {low:g} or more")
    return found


def whole(value: Any, name: str, low: int = 0) -> int:
    """Return a whole number, which may be written as ``5e8``.

    Raises:
        ConfigError: no whole number, or one below ``low``.
    """
    found = number(value, name, low)
    if found != int(found):
        raise ConfigError(f"{name} = {value!r}: give a whole number")
    return int(found)


def bucket_bytes(elements: Iterable[int]) -> int | None:
    """Return ``bucket_size``, in bytes, for the least of these upper bounds in fp32 elements; None: the default.

    Published sizes are of hundreds of millions, for single collectives of a large model. Ours are smaller by default.
    """
    least = min((4 * one for one in elements), default=MOST_BYTES)
    return None if least >= MOST_BYTES else least


def switch(value: Any, name: str) -> bool:
    """Return True or False.

    Raises:
        ConfigError: anything else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}: give true or false")
    return value


def say_without_effect(keys: Iterable[str], where: str) -> None:
    """Warn once of all keys that have no effect here."""
    if found := tuple(keys):
        say(f"without effect in {where}: {', '.join(found)}")
