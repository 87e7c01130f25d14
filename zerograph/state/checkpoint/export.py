"""A checkpoint as what plain PyTorch and other libraries read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from zerograph.base.progress import tell
from zerograph.errors import CheckpointError, ConfigError
from zerograph.runtime.checkpoint.storage import Reader, write_file
from zerograph.state.checkpoint.load import open_checkpoint, plain_optimizer_state
from zerograph.state.checkpoint.written import written


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All of a checkpoint in memory, as ``step.state_dict()`` was when it was saved; needs no job and no graph.

    ``["modules"]["model"]`` loads into the plain model, ``["optimizers"][0]`` into the plain optimizer.

    Raises:
        CheckpointError: there is none, or a file is missing or damaged.
    """
    reader = open_checkpoint(path)
    found = written(reader)
    return {
        "modules": {module: _module(reader, module, found.aliases) for module in modules_in(reader)},
        "optimizers": [plain_optimizer_state(reader, number, one) for number, one in enumerate(found.groups)],
        "lr_schedulers": found.schedulers,
        "steps_done": found.counts[0],
        "grad_scaler": found.scaler,
        "random": {"seed": found.counts[2], "passes": found.counts[1]},
    }


def export(path: str | os.PathLike[str], out: str | os.PathLike[str], module: str | None = None) -> Path:
    """Write a module's parameters and buffers into one safetensors file, under the plain module's names.

    ``model.load_state_dict(safetensors.torch.load_file(out), strict=False)`` reads it (tied weights are in it once, so
    that of a model without any it may be strict). For a model of transformers give a folder: its ``config.json``, and
    ``generation_config.json`` if it generates, are written beside, and ``from_pretrained(folder)`` loads it.

    Args:
        path: the checkpoint.
        out: a file whose name ends in ``.safetensors``; or a folder, made if need be, for ``model.safetensors``.
        module: the graph's attribute; None where it has only one.

    Returns:
        The safetensors file.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, or the file cannot be written.
        ConfigError: no such module, or several to choose from.
    """
    reader = open_checkpoint(path)
    found = written(reader)
    there = modules_in(reader)
    if module is None and len(there) != 1:
        raise ConfigError(f"the checkpoint has the modules {', '.join(there) or 'none'}: say which with module=")
    if module is not None and module not in there:
        raise ConfigError(f"the checkpoint has no module {module!r}; it has {', '.join(there)}")
    chosen, target = module or there[0], Path(out)
    alone = target.suffix == ".safetensors" and not target.is_dir()
    folder = target.parent if alone else target
    target = target if alone else folder / "model.safetensors"
    # Names of one tensor are one tensor: a safetensors file has it once, and loaders tie the others to it.
    tensors = _module(reader, chosen, {})
    texts = {} if alone else {name: json.dumps(one, indent=2) + "\n" for name, one in found.pretrained(chosen).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _replace(folder / name, partial(_write_text, text))
        _replace(target, lambda path: write_file(tensors, path, {"format": "pt"}))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    return target


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then put it in the target's place."""
    beside = target.with_name(f".{target.name}.part")
    try:
        write(beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def modules_in(reader: Reader) -> list[str]:
    """The modules of a checkpoint: attributes of the graph that wrote it."""
    names = (name.split(".", 2)[1] for name in reader.index.tensors if name.startswith("modules."))
    return list(dict.fromkeys(names))


def _module(reader: Reader, module: str, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    start = f"modules.{module}."
    names = [name for name in reader.index.tensors if name.startswith(start)]
    found = {}
    for number, name in enumerate(names):
        tell("tensors", number, len(names), name)
        found[name.removeprefix(start)] = reader.whole(name)
    for alias, name in aliases.items():
        if alias.startswith(f"{module}.") and name.startswith(f"{module}."):
            found[alias.removeprefix(f"{module}.")] = found[name.removeprefix(f"{module}.")]
    return found
