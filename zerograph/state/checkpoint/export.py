"""Export a checkpoint for plain PyTorch and other libraries."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from zerograph.base.cache import replacing
from zerograph.base.progress import tell
from zerograph.errors import CheckpointError, ConfigError
from zerograph.runtime.checkpoint.storage import Reader, write_file
from zerograph.state.checkpoint.load import open_checkpoint, plain_optimizer_state
from zerograph.state.checkpoint.written import written


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a whole checkpoint into memory, as ``step.state_dict()`` returned it at the save. Needs no job and no graph.

    ``["modules"]["model"]`` loads into the plain model, ``["optimizers"][0]`` into the plain optimizer.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or damaged.
    """
    reader = open_checkpoint(path)
    document = written(reader)
    return {
        "modules": {
            module: {
                **_module(reader, module, document.aliases),
                **{
                    f"{name.partition('.')[2]}._extra_state".lstrip("."): state
                    for name, state in document.extra_state.items()
                    if name.partition(".")[0] == module
                },
            }
            for module in modules_in(reader)
        },
        **document.state,
        "optimizers": [plain_optimizer_state(reader, number, groups) for number, groups in enumerate(document.groups)],
    }


def export(path: str | os.PathLike[str], out: str | os.PathLike[str], module: str | None = None) -> Path:
    """Write a module's parameters and buffers into one safetensors file, under the plain module's names.

    ``model.load_state_dict(safetensors.torch.load_file(out), strict=False)`` reads it.
    The file holds tied weights once; a model without tied weights can be loaded with ``strict=True``. For a model of
    transformers, give a folder: ``config.json`` and, if the model has one, ``generation_config.json`` are written into
    it too, and ``from_pretrained(folder)`` loads it.

    Args:
        path: the checkpoint.
        out: a file whose name ends in ``.safetensors``, or a folder for ``model.safetensors``, created if needed.
        module: name of the graph's attribute; may be None if the graph has only one module.

    Returns:
        The path of the safetensors file.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, or the file cannot be written.
        ConfigError: there is no such module, or there are several and ``module`` is None.
    """
    if re.match(r"[a-z][a-z0-9+]+:/", os.fspath(out)):
        raise CheckpointError(f"{os.fspath(out)} is a URL: export into a local file or folder, and copy it from there")
    reader = open_checkpoint(path)
    document = written(reader)
    modules = modules_in(reader)
    if module is None and len(modules) != 1:
        raise ConfigError(f"the checkpoint has the modules {', '.join(modules) or 'none'}: say which with module=")
    if module is not None and module not in modules:
        raise ConfigError(f"the checkpoint has no module {module!r}; it has {', '.join(modules)}")
    chosen, target = module or modules[0], Path(out)
    only_weights = target.suffix == ".safetensors" and not target.is_dir()
    folder = target.parent if only_weights else target
    target = target if only_weights else folder / "model.safetensors"
    # A safetensors file holds tied weights once, and loaders tie the other names to them.
    tensors = _module(reader, chosen, {})
    configurations = {} if only_weights else document.pretrained(chosen)
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in configurations.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(folder / name) as beside:
                beside.write_text(text, encoding="utf-8")
        with replacing(target) as beside:
            write_file(tensors, beside, {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    return target


def modules_in(reader: Reader) -> list[str]:
    """Return the names of a checkpoint's modules: attributes of the graph that wrote it."""
    names = (name.split(".", 2)[1] for name in reader.index.tensors if name.startswith("modules."))
    return list(dict.fromkeys(names))


def _module(reader: Reader, module: str, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    start = f"modules.{module}."
    names = [name for name in reader.index.tensors if name.startswith(start)]
    tensors = {}
    for number, name in enumerate(names):
        tell("tensors", number, len(names), name)
        tensors[name.removeprefix(start)] = reader.whole(name)
    for alias, name in aliases.items():
        if alias.startswith(f"{module}.") and name.startswith(f"{module}."):
            tensors[alias.removeprefix(f"{module}.")] = tensors[name.removeprefix(f"{module}.")]
    return tensors
