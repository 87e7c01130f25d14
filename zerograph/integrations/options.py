"""The argument ``zero=`` of all integrations, and errors about options that would have no effect."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from zerograph.config import Config
from zerograph.errors import ConfigError
from zerograph.ir.zero import DEFAULT_STAGE

Zero = Config | Mapping[str, Any] | int | str | None


def config_of(zero: Zero) -> Config:
    """Return the configuration that ``zero=`` means.

    Args:
        zero: a configuration; a mapping of its options, with ``stage`` among them; a stage, 0 to 3, where 0 shards
            nothing; None: stage 2.

    Raises:
        ConfigError: it is something else, or has an option that does not exist.
    """
    if isinstance(zero, Config):
        return copy.copy(zero)
    options = dict(zero) if isinstance(zero, Mapping) else {} if zero is None else {"stage": zero}
    stage: Any = options.pop("stage", DEFAULT_STAGE)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"zero={zero!r:.60}: give a stage (0 to 3), a dict of options, or a zg.Config")
    return Config(stage=stage, **options)


def refuse(framework: str, unsupported: Iterable[tuple[str, Any, str]]) -> None:
    """Raise unless no option is used that zerograph does not support.

    Args:
        framework: what the options belong to, for the message.
        unsupported: for each such option its name, a value that is true if it is set, and what to do instead.

    Raises:
        ConfigError: one is set.
    """
    if lines := "".join(f"\n  {name}: {advice}" for name, value, advice in unsupported if value):
        raise ConfigError(f"{framework} has options that zerograph does not support{lines}")
