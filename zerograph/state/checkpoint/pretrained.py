"""Read the configuration files that `from_pretrained` of transformers needs in addition to the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

# Attribute of the model, and the file that `from_pretrained` looks for.
FILES: Mapping[str, str] = {"config": "config.json", "generation_config": "generation_config.json"}


def configurations(module: nn.Module) -> dict[str, Any]:
    """Return the JSON files that ``save_pretrained`` would write in addition to the weights, by file name.

    A configuration is recognized by its method ``to_json_string()``: transformers need not be installed. For models of
    other libraries the result is {}.
    """
    files: dict[str, Any] = {}
    for attribute, file in FILES.items():
        write = getattr(getattr(module, attribute, None), "to_json_string", None)
        if not callable(write):
            continue
        try:
            body = json.loads(write())
        except (TypeError, ValueError):
            # Another library's method of the same name.
            continue
        if isinstance(body, dict):
            files[file] = body
    if FILES["config"] not in files:
        return {}
    # save_pretrained sets the same two keys: the class to construct, and the dtype to load in.
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    files[FILES["config"]]["architectures"] = [type(module).__name__]
    if dtypes:
        files[FILES["config"]]["dtype"] = str(dtypes[0]).removeprefix("torch.")
    return files
