"""The whole state of a prepared module, on one rank, gathered bucket by bucket."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.base import cache
from zerograph.base.source import warn_user
from zerograph.loops.loop import Loop
from zerograph.runtime.job.process_group import agree
from zerograph.runtime.state import gather_parts, store_of, stores_of


def last_complete(folder: str | os.PathLike[str]) -> str | None:
    """Return the last checkpoint of a trainer that was written to its end, or None. Warn of later ones.

    A trainer writes ``trainer_state.json`` last.
    """
    numbered = {
        int(match[1]): path for path in Path(folder).glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(path.name))
    }
    cut = []
    for _, path in sorted(numbered.items(), reverse=True):
        try:
            json.loads(cache.read(path / "trainer_state.json"))
        except (OSError, ValueError):
            cut.append(path.name)
            continue
        if cut:
            warn_user(f"training goes on from {path}: {', '.join(cut)} is not complete, its save was cut off")
        return str(path)
    return None


_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def whole_state(
    module: nn.Module, loop: Loop, *, here: bool, wanted: Callable[[str, Tensor], bool] | None = None
) -> dict[str, Tensor]:
    """Gather the state of a prepared module. A collective; other ranks hold one bucket at a time.

    Args:
        module: a module of the loop.
        loop: the loop that it was prepared for.
        here: return the state on this rank; otherwise the result is empty.
        wanted: whether an entry, by its name, is needed. Buckets without such an entry are not gathered.

    Returns:
        What ``module.state_dict()`` of one process would return. Tied parameters are one tensor.
    """
    loop.graph()
    entries: Mapping[str, Any] = module.state_dict(keep_vars=True)
    names = [name for name, value in entries.items() if wanted is None or wanted(name, value)]
    parameters = [entries[name] for name in names if isinstance(entries[name], nn.Parameter)]
    needed, whole = {id(parameter) for parameter in parameters}, dict[int, Tensor]()
    for number, store in enumerate(stores_of(parameters)):
        # A rank that was interrupted may save alone, as a callback of Lightning does.
        agree(store.job, f"saving bucket {number} of a model", 0, dict)
        indices = [index for index, parameter in enumerate(store.parameters) if id(parameter) in needed]
        for index, part in gather_parts(store, indices):
            if here:
                whole[id(store.parameters[index])] = part.detach().to("cpu", copy=True)
    if not here:
        return {}
    with torch.no_grad():
        for name in names:
            value = entries[name]
            if isinstance(value, Tensor) and store_of(value) is None:
                whole.setdefault(id(value), value.detach().to("cpu", copy=True))
    return {name: whole[id(entries[name])] for name in names if isinstance(entries[name], Tensor)}
