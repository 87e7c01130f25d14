"""Read sections of a configuration: refuse unknown keys, check values, warn of keys without effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from zerograph.compat.notices import say
from zerograph.errors import ConfigError, did_you_mean


def section(value: Any, name: str, keys: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a section.

    Args:
        value: the section.
        name: its name, for messages.
        keys: the keys that it may have.

    Raises:
        ConfigError: ``value`` is not a dict, or has a key that does not exist; the message lists the keys.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r:.60}: give a dict")
    choices = tuple(keys)
    for key in value:
        if key not in choices:
            hint = did_you_mean(str(key), choices, most=1)
            raise ConfigError(f"{name} has no key {key!r}{hint}\nKeys: {', '.join(choices)}.")
    return dict(value)


def number(value: Any, name: str, low: float = 0) -> float:
    """Return a number from JSON, or from a string such as ``"5e8"``.

    Raises:
        ConfigError: ``value`` is not a finite number, or is below ``low``.
    """
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not low <= result < math.inf:
        raise ConfigError(f"{name} = {value!r}: give a number, {low:g} or more")
    return result


def whole(value: Any, name: str, low: int = 0) -> int:
    """Return a whole number, which may be written as ``5e8``.

    Raises:
        ConfigError: ``value`` is not a whole number, or is below ``low``.
    """
    result = number(value, name, low)
    if result != int(result):
        raise ConfigError(f"{name} = {value!r}: give a whole number")
    return int(result)


def switch(value: Any, name: str) -> bool:
    """Return True or False.

    Raises:
        ConfigError: ``value`` is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}: give true or false")
    return value


def not_auto(value: Any, name: str) -> Any:
    """Return a value that is not ``"auto"``.

    Raises:
        ConfigError: the value is ``"auto"``, which only transformers' Trainer replaces.
    """
    if isinstance(value, str) and value == "auto":
        raise ConfigError(f"{name} is 'auto', which transformers' Trainer fills in: give a value")
    return value


def without_effect(values: Mapping[str, Any], name: str, harmless: Mapping[str, Any]) -> list[str]:
    """List the keys of a section that ask for something which has no effect here.

    Args:
        values: the section.
        name: its name, put before each key.
        harmless: for each key without effect the value that describes what a graph does anyway; ``...``: any value.
    """
    return [
        f"{name}.{key}"
        for key, same in harmless.items()
        if key in values and same is not ... and values[key] not in (same, "auto", None)
    ]


def warn_without_effect(keys: Iterable[str], configuration: str) -> None:
    """Warn once of all keys that have no effect; ``configuration`` is what the message calls their origin."""
    if listed := ", ".join(keys):
        say(f"without effect in {configuration}: {listed}")
