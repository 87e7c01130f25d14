"""Read sections of a configuration: known keys, checked values, and lists of the keys that have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from zerograph.compat.notices import say
from zerograph.errors import ConfigError, did_you_mean

_NONE: Mapping[str, Any] = MappingProxyType({})


class Section(dict[str, Any]):
    """A copy of a section, with known keys only.

    Args:
        value: the section.
        name: its name, for messages.
        read: the keys that are translated.
        same: the keys without effect, each with the value that describes what a graph does anyway; None: a value that
            asks for nothing, see :func:`asks`; ``...``: any value.
        refused: the keys that would change what is computed, each with advice.
        is_whole: it is the whole configuration, in which messages name keys alone.

    Attributes:
        unused: names of the keys that ask for something which has no effect here.

    Raises:
        ConfigError: ``value`` is not a dict, has a key that does not exist (the message lists the keys), or asks for
            something that is refused.
    """

    def __init__(
        self,
        value: Any,
        name: str,
        read: Iterable[str],
        same: Mapping[str, Any] = _NONE,
        refused: Mapping[str, str] = _NONE,
        *,
        is_whole: bool = False,
    ) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r:.60}: give a dict")
        keys = sorted([*read, *same, *refused]) if same or refused else list(read)
        for key in value:
            if key not in keys:
                hint = did_you_mean(str(key), keys, most=1)
                raise ConfigError(f"{name} has no key {key!r}{hint}\nKeys: {', '.join(keys)}.")
        super().__init__(value)
        self.name, self._prefix = name, "" if is_whole else f"{name}."
        for key, advice in refused.items():
            if asks(self.get(key), key):
                raise ConfigError(f"{self.path(key)}: {advice}")
        self.unused = [self.path(key) for key, usual in sorted(same.items()) if self._is_unused(key, usual)]

    def _is_unused(self, key: str, usual: Any) -> bool:
        value = self.get(key)
        return usual is not ... and value not in (usual, "auto", None) and (usual is not None or asks(value))

    def path(self, key: str) -> str:
        """Return a key's name for messages."""
        return f"{self._prefix}{key}"

    def section(self, key: str, read: Iterable[str], refused: Mapping[str, str] = _NONE) -> Section:
        """Return an inner section; an empty one if it is absent."""
        return Section(self.get(key) or {}, self.path(key), read, refused=refused)

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value that is not ``"auto"``."""
        return not_auto(self.get(key, default), self.path(key))

    def number(self, key: str, default: float = 0) -> float:
        """Return a number; see :func:`number`."""
        return number(self.value(key, default), self.path(key))

    def whole(self, key: str, default: float = 0, low: int = 0) -> int:
        """Return a whole number; see :func:`whole`."""
        return whole(self.value(key, default), self.path(key), low)

    def switch(self, key: str, default: bool = False) -> bool:
        """Return True or False."""
        return switch(self.value(key, default), self.path(key))


def asks(value: Any, key: str = "") -> bool:
    """Return whether a value asks for anything: a section does unless it is disabled, a size of 1 does not."""
    if key.endswith("_size") and value == 1:
        return False
    if isinstance(value, Mapping):
        sizes = [size for name, size in value.items() if name.endswith("size")]
        return bool(value) and value.get("enabled", True) is not False and sizes != [1]
    return bool(value) and value not in (-1, "none")


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


def warn_without_effect(keys: Iterable[str], configuration: str) -> None:
    """Warn once of all keys that have no effect; ``configuration`` is what the message calls their origin."""
    if listed := ", ".join(keys):
        say(f"without effect in {configuration}: {listed}")
