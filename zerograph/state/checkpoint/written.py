"""Decode the document of a checkpoint, and check the type of every entry."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerograph.errors import CheckpointError, ConfigError
from zerograph.ir.coded_state import saved_codec
from zerograph.runtime.checkpoint.index import DTYPES
from zerograph.runtime.checkpoint.storage import Reader
from zerograph.state.checkpoint.document import decode
from zerograph.state.checkpoint.pretrained import FILES
from zerograph.state.schema import CALL, DOCUMENT, GRAPH, check

Counts = tuple[int, int, int | None]
# A kind of calls of a loop: what it is, the number of results, and those that the loop differentiates.
Call = tuple[str, int, list[int]]


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
        check(document, DOCUMENT, "no document of a checkpoint")
        state = {
            "optimizers": [{"param_groups": list(map(decode, groups))} for groups in document["optimizers"]],
            "lr_schedulers": list(map(decode, document["lr_schedulers"])),
            "grad_scaler": decode(document["grad_scaler"]),
            "steps_done": document["steps_done"],
            "random": {"seed": document["seed"], "passes": document["passes_done"]},
        }
        check(state, GRAPH, "not a state of a graph")
        decoded = Written(
            state,
            document["ranks"],
            document["aliases"],
            # Checkpoints of earlier versions have none of these.
            {module: decode(state) for module, state in document.get("extra_state", {}).items()},
            document.get("pretrained", {}),
            [_call(*call) for call in document.get("calls", [])],
        )
        for number, groups in enumerate(decoded.groups):
            numbers = [number for group in groups for number in group["params"]]
            if {*map(type, numbers)} - {int} or numbers != list(range(len(numbers))):
                raise ValueError(f"the parameters of optimizer {number} have the numbers {numbers!r:.40}")
        if len(state["lr_schedulers"]) != len(decoded.groups):
            raise ValueError("it needs a scheduler, or None, for each optimizer")
        _check_aliases(reader, decoded.aliases)
        _check_tensors(reader, decoded)
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{reader.folder} is damaged: in its document {error!s:.200}") from error
    return decoded


def _call(name: Any, results: Any, used: Any) -> Call:
    check({"name": name, "results": results, "used": used}, CALL, "no call")
    if not all(one < results for one in used):
        raise ValueError(f"{name!r:.40} has {results} results, not {used!r:.40}")
    return name, results, used


def _check_aliases(reader: Reader, aliases: Mapping[str, str]) -> None:
    for alias, name in aliases.items():
        if f"modules.{name}" not in reader.index.tensors:
            raise ValueError(f"{alias!r:.40} is an alias of {name!r:.40}, which is not there")
        if f"modules.{alias}" in reader.index.tensors:
            raise ValueError(f"{alias!r:.40} is both a tensor and an alias")


_FLOATING = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
# Tensors by the first part of their names: the rest of it, possible dtypes, and the number of dimensions.
_TENSORS: Mapping[str, tuple[str, Collection[str], int | None]] = {
    "modules": (r"[^.]+\..+", DTYPES, None),
    "optimizers": (r"\d{1,9}\.state\.\d{1,9}\..+", DTYPES, None),
    "residuals": (r"\d{1,9}\..+", _FLOATING, 2),
    "received": (r".+", _FLOATING, None),
    "generators": (r"\d{1,9}\.(cpu|cuda)", ["uint8"], 1),
}


def _check_tensors(reader: Reader, document: Written) -> None:
    """Check that every tensor belongs to a module, to a parameter's optimizer state or to a generator."""
    # A checkpoint has a generator of each rank that wrote it.
    ranks = sum(name.startswith("generators.") and name.endswith(".cpu") for name in reader.index.tensors)
    sizes = [sum(len(group["params"]) for group in groups) for groups in document.groups]
    for name, entry in reader.index.tensors.items():
        kind, _, rest = name.partition(".")
        pattern, dtypes, dims = _TENSORS.get(kind, ("", (), None))
        if not pattern or not re.fullmatch(pattern, rest, re.S):
            raise ValueError(f"{name!r:.60} is not a name of a tensor in a checkpoint")
        if entry.dtype not in dtypes or dims not in (None, len(entry.shape)):
            raise ValueError(f"{name!r:.60} is of {entry.dtype} {entry.shape!r:.60}, which {kind} are not")
        if kind == "optimizers":
            optimizer, _, parameter, *_ = rest.split(".")
            if not (int(optimizer) < len(sizes) and int(parameter) < sizes[int(optimizer)]):
                raise ValueError(f"{name!r:.60} belongs to no parameter")
            codec = saved_codec(name)
            if codec is not None and (entry.dtype != "uint8" or entry.shape[1:] != (codec.block_bytes,)):
                raise ValueError(f"{name!r:.60} has no codes of blocks")
        if kind == "residuals" and entry.shape[0] != min(ranks, document.ranks):
            raise ValueError(f"{name!r:.60} has no row for each of {document.ranks} ranks")
