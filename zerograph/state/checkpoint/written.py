"""Decode the document of a checkpoint, and check the type of every entry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerograph.errors import CheckpointError, ConfigError
from zerograph.ir.coded_state import saved_codec
from zerograph.runtime.checkpoint.index import DTYPES
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.state.checkpoint.document import decode
from zerograph.state.checkpoint.pretrained import FILES
from zerograph.state.checks import check_form

Counts = tuple[int, int, int | None]
# A kind of calls of a loop: what it is, the number of results, and those that the loop differentiates.
Call = tuple[str, int, list[int]]

_NAMES = re.compile(
    r"modules\.[^.]+\..+|optimizers\.\d{1,9}\.state\.\d{1,9}\..+|residuals\.\d{1,9}\..+|received\..+"
    r"|generators\.\d{1,9}\.(cpu|cuda)",
    re.S,
)


@dataclass(frozen=True)
class Written:
    """A checkpoint's document, decoded.

    Attributes:
        state: what ``state_dict()`` of the graph returned, without modules and without the state of parameters.
        ranks: number of ranks that wrote it.
        aliases: from further names of tied tensors to the name that the checkpoint has.
        extra_state: what ``get_extra_state()`` of modules returned, by the module's qualified name.
        calls: the calls of a loop that were graphs.
        configurations: by module, JSON files that models of transformers need in addition to the weights, by file name.
    """

    state: dict[str, Any]
    ranks: int
    aliases: Mapping[str, str]
    extra_state: Mapping[str, Any]
    configurations: Mapping[str, Mapping[str, Any]]
    calls: Sequence[Call]

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer, with the numbers of their parameters."""
        return [optimizer["param_groups"] for optimizer in self.state["optimizers"]]

    @property
    def counts(self) -> Counts:
        """Updates done, forward passes done, and the seed of random numbers."""
        random = self.state["random"]
        return self.state["steps_done"], random["passes"], random["seed"]

    def pretrained(self, module: str) -> dict[str, Any]:
        """Return the JSON files of a module that ``from_pretrained`` needs, by file name; {} for other modules."""
        # Only these names: a checkpoint must not choose where to write.
        files = self.configurations.get(module, {})
        return {name: files[name] for name in FILES.values() if name in files}


def written(reader: Reader) -> Written:
    """Decode and check the document of a checkpoint.

    Raises:
        CheckpointError: an entry is missing, or has another type than :func:`state_of` writes.
    """
    document = reader.index.document
    try:
        state = {
            "optimizers": [
                {"param_groups": [_texts(decode(group)) for group in _list(groups)]}
                for groups in _list(document["optimizers"])
            ],
            "lr_schedulers": [
                None if state is None else _texts(decode(state)) for state in _list(document["lr_schedulers"])
            ],
            "grad_scaler": None if document["grad_scaler"] is None else _texts(decode(document["grad_scaler"])),
            "steps_done": document["steps_done"],
            "random": {"seed": document["seed"], "passes": document["passes_done"]},
        }
        check_form(state)
        decoded = Written(
            state,
            _whole(document["ranks"]),
            _aliases(reader, document["aliases"]),
            # Checkpoints of earlier versions have none of these.
            {module: decode(state) for module, state in _texts(document.get("extra_state", {})).items()},
            {module: _texts(files) for module, files in _texts(document.get("pretrained", {})).items()},
            [_call(*_list(call)) for call in _list(document.get("calls", []))],
        )
        for number, optimizer_groups in enumerate(decoded.groups):
            _check_numbers(number, optimizer_groups)
        if len(state["lr_schedulers"]) != len(decoded.groups):
            raise ValueError("it needs a scheduler, or None, for each optimizer")
        _check_tensors(reader, decoded)
    except KeyError as error:
        raise CheckpointError(f"{reader.folder} is damaged: its document lacks {error}") from error
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{reader.folder} is damaged: in its document {error!s:.200}") from error
    return decoded


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is not a list")
    return value


def _call(name: Any, results: Any, used: Any) -> Call:
    if not isinstance(name, str) or not all(_whole(one) < _whole(results) for one in _list(used)):
        raise TypeError(f"{name!r:.40} is not a call")
    return name, results, used


def _texts(value: Any) -> dict[str, Any]:
    """Return the value if it is a dict with string keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{value!r:.40} is not a state dict")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _check_numbers(optimizer: int, groups: list[dict[str, Any]]) -> None:
    """Check that the groups number the parameters 0, 1, 2 and so on."""
    numbers = [number for group in groups for number in _list(group["params"])]
    if not all(type(number) is int for number in numbers) or numbers != list(range(len(numbers))):
        raise ValueError(f"the parameters of optimizer {optimizer} have the numbers {numbers!r:.40}")


def _aliases(reader: Reader, value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is not a dict of aliases")
    for alias, name in value.items():
        if not isinstance(name, str) or f"modules.{name}" not in reader.index.tensors:
            raise ValueError(f"{alias!r:.40} is an alias of {name!r:.40}, which is not there")
        if f"modules.{alias}" in reader.index.tensors:
            raise ValueError(f"{alias!r:.40} is both a tensor and an alias")
    return value


def _check_tensors(reader: Reader, document: Written) -> None:
    """Check that every tensor belongs to a module, to a parameter's optimizer state or to a generator."""
    # A checkpoint has a generator of each rank that wrote it.
    ranks = sum(name.startswith("generators.") and name.endswith(".cpu") for name in reader.index.tensors)
    sizes = [sum(len(group["params"]) for group in groups) for groups in document.groups]
    for name, entry in reader.index.tensors.items():
        if not _NAMES.fullmatch(name):
            raise ValueError(f"{name!r:.60} is not a name of a tensor in a checkpoint")
        kind, number, *rest = name.split(".")
        if kind == "optimizers" and not (int(number) < len(sizes) and int(rest[1]) < sizes[int(number)]):
            raise ValueError(f"{name!r:.60} belongs to no parameter")
        codec = saved_codec(name) if kind == "optimizers" else None
        if codec is not None and (entry.dtype != "uint8" or entry.shape[1:] != (codec.block_bytes,)):
            raise ValueError(f"{name!r:.60} has no codes of blocks")
        if kind == "residuals" and entry.shape[:1] != (min(ranks, document.ranks),):
            raise ValueError(f"{name!r:.60} has no row for each of {document.ranks} ranks")
        if kind == "residuals" and (len(entry.shape) != 2 or not DTYPES[entry.dtype].is_floating_point):
            raise ValueError(f"{name!r:.60} has no row for each rank")
        if kind == "received" and not DTYPES[entry.dtype].is_floating_point:
            raise ValueError(f"{name!r:.60} are no weights")
        if kind == "generators" and (entry.dtype != "uint8" or len(entry.shape) != 1):
            raise ValueError(f"{name!r:.60} is not a state of a generator")
