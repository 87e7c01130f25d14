"""Schemas of saved states, and one check of a state, which names the entry that differs.

A schema is ``...`` for anything, a type, a range of whole numbers, ``(schema, None)`` for what may be None,
``[schema]`` for a list, or a dict. Keys of a dict that end in ``?`` may be left out; ``...`` and ``str`` are for all
other keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerograph.errors import ConfigError

COUNT = range(2**63)
SEED = (int, None)
NAMED = {str: ...}
SCHEDULER: dict[Any, Any] = {str: ...}
SCHEDULER["_schedulers?"] = ([SCHEDULER], None)
OPTIMIZER = {"param_groups": [{"params": [...], str: ...}], "state?": {...: {...: ...}}, ...: ...}
GRAPH = {
    "modules?": {...: {...: ...}},
    "optimizers?": [OPTIMIZER],
    "lr_schedulers?": [(SCHEDULER, None)],
    "steps_done?": COUNT,
    "grad_scaler?": (NAMED, None),
    "random?": {"seed": SEED, "passes": COUNT, ...: ...},
}
CALL = {"name": str, "results": COUNT, "used": [COUNT]}
# What a checkpoint has besides tensors, still encoded. Those of earlier versions lack some; others are for readers.
DOCUMENT = {
    "optimizers": [[...]],
    "lr_schedulers": [...],
    "grad_scaler": ...,
    "steps_done": COUNT,
    "passes_done": COUNT,
    "seed": SEED,
    "ranks": COUNT,
    "aliases": {str: str},
    "extra_state?": NAMED,
    "pretrained?": {str: NAMED},
    "calls?": [[...]],
    ...: ...,
}


def check(value: Any, schema: Any, what: str, place: str = "") -> None:
    """Check a value and all that is inside.

    Args:
        what: what the value is not if it differs, for messages.
        place: where it is.

    Raises:
        ConfigError: an entry is of another kind, or missing, or not in the schema; names it.
    """
    if isinstance(schema, tuple):
        schema = ... if value is None else schema[0]
    if schema is ...:
        return
    kind, words = _KINDS[schema if isinstance(schema, type) else type(schema)]
    is_other = isinstance(value, (str, bool)) and kind is not str
    if is_other or not isinstance(value, kind) or (isinstance(schema, range) and int(value) not in schema):
        raise ConfigError(f"{what}: {place or 'it'} is {' '.join(repr(value).split())[:60]}, not {words}")
    if isinstance(schema, list):
        schema, value = {...: schema[0]}, dict(enumerate(value))
    if isinstance(schema, dict):
        named = {key.removesuffix("?"): key for key in schema if isinstance(key, str)}
        if missing := [name for name, key in named.items() if name == key and name not in value]:
            raise ConfigError(f"{what}: {place or 'it'} lacks {', '.join(missing)}")
        for key, entry in value.items():
            other = str if isinstance(key, str) and str in schema else ...
            if (inner := schema.get(named.get(key, other))) is None:
                raise ConfigError(f"{what}: {place or 'it'} has {key!r:.60}; it may have {', '.join(named) or 'texts'}")
            check(entry, inner, what, f"{place}[{key!r:.60}]" if place else f"{key!s:.60}")


_KINDS: Mapping[type, tuple[Any, str]] = {
    list: (Sequence, "a list"),
    dict: (Mapping, "a dict"),
    range: (int, "a whole number, 0 or more"),
    int: (int, "an int"),
    str: (str, "a text"),
}
