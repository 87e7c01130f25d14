"""What a checkpoint says beside its tensors: read, with everything of the type that it must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.state.checkpoint.document import decode
from zerograph.state.checkpoint.pretrained import FILES

Counts = tuple[int, int, int | None]

_NAMES = re.compile(r"modules\.[^.]+\..+|optimizers\.\d{1,9}\.state\.\d{1,9}\..+|generators\.\d{1,9}\.(cpu|cuda)", re.S)


@dataclass(frozen=True)
class Written:
    """A checkpoint's document, decoded.

    Attributes:
        groups: of each optimizer its parameter groups, with the numbers of their parameters.
        schedulers: of each optimizer the state of its scheduler, or None; scaler: that of the loss scaling, or None.
        counts: steps, forward passes, and the seed of random numbers.
        ranks: how many wrote it.
        aliases: other names of tensors of modules.
        configurations: of models of transformers, by module, the files beside the weights, as what JSON has.
    """

    groups: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any] | None]
    scaler: dict[str, Any] | None
    counts: Counts
    ranks: int
    aliases: Mapping[str, str]
    configurations: Mapping[str, Mapping[str, Any]]

    def pretrained(self, module: str) -> dict[str, Any]:
        """What ``from_pretrained`` needs beside a module's weights, by the file's name; {} for other modules."""
        # Only these names: a checkpoint does not say where to write.
        held = self.configurations.get(module, {})
        return {name: held[name] for name in FILES.values() if name in held}


def written(reader: Reader) -> Written:
    """The document of a checkpoint.

    Raises:
        CheckpointError: something in it is missing, or of another type than what :func:`state_of` writes.
    """
    document = reader.index.document
    try:
        groups = [[_group(one) for one in _list(groups)] for groups in _list(document["optimizers"])]
        found = Written(
            groups,
            [None if one is None else _texts(decode(one)) for one in _list(document["lr_schedulers"])],
            None if document["grad_scaler"] is None else _texts(decode(document["grad_scaler"])),
            (_whole(document["steps_done"]), _whole(document["passes_done"]), _seed(document["seed"])),
            _whole(document["ranks"]),
            _aliases(reader, document["aliases"]),
            # Checkpoints of version 0.1 have none.
            {module: _texts(files) for module, files in _texts(document.get("pretrained", {})).items()},
        )
        for number, one in enumerate(groups):
            _check_numbers(number, one)
        if len(found.schedulers) != len(groups):
            raise ValueError("it needs a scheduler, or None, for each optimizer")
        _check_tensors(reader, found)
    except KeyError as error:
        raise CheckpointError(f"{reader.folder} is damaged: its document lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{reader.folder} is damaged: in its document {error!s:.200}") from error
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return value


def _texts(value: Any) -> dict[str, Any]:
    """A dict by texts."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{value!r:.40} is no state")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{value!r:.40} is no count")
    return value


def _seed(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"{value!r:.40} is no seed")
    return value


def _group(value: Any) -> dict[str, Any]:
    return _texts(decode(value))


def _check_numbers(optimizer: int, groups: list[dict[str, Any]]) -> None:
    """Parameters are numbered through, group after group."""
    numbers = [one for group in groups for one in _list(group["params"])]
    if not all(type(one) is int for one in numbers) or numbers != list(range(len(numbers))):
        raise ValueError(f"the parameters of optimizer {optimizer} have the numbers {numbers!r:.40}")


def _aliases(reader: Reader, value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} are no other names")
    for alias, name in value.items():
        if not isinstance(name, str) or f"modules.{name}" not in reader.index.tensors:
            raise ValueError(f"{alias!r:.40} is another name of {name!r:.40}, which is not there")
        if f"modules.{alias}" in reader.index.tensors:
            raise ValueError(f"{alias!r:.40} is a name and another name")
    return value


def _check_tensors(reader: Reader, found: Written) -> None:
    """Every tensor is something's."""
    sizes = [sum(len(group["params"]) for group in groups) for groups in found.groups]
    for name, entry in reader.index.tensors.items():
        if not _NAMES.fullmatch(name):
            raise ValueError(f"{name!r:.60} belongs to nothing")
        kind, number, *rest = name.split(".")
        if kind == "optimizers" and not (int(number) < len(sizes) and int(rest[1]) < sizes[int(number)]):
            raise ValueError(f"{name!r:.60} belongs to no parameter")
        if kind == "generators" and (entry.dtype != "uint8" or len(entry.shape) != 1):
            raise ValueError(f"{name!r:.60} is no state of a generator")
