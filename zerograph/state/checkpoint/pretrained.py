"""What `from_pretrained` of transformers needs beside the weights: the model's own configuration, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

# Attribute of the model, and the file that `from_pretrained` looks for.
FILES: Mapping[str, str] = {"config": "config.json", "generation_config": "generation_config.json"}


def configurations(module: nn.Module) -> dict[str, Any]:
    """The files that ``save_pretrained`` would write beside the weights, by name, as what JSON has.

    {} for other models. A configuration is known by its ``to_json_string()``: transformers need not be installed.
    """
    found: dict[str, Any] = {}
    for attribute, file in FILES.items():
        write = getattr(getattr(module, attribute, None), "to_json_string", None)
        if not callable(write):
            continue
        try:
            body = json.loads(write())
        except (TypeError, ValueError):
            # Somebody else's method of that name.
            continue
        if isinstance(body, dict):
            found[file] = body
    if FILES["config"] not in found:
        return {}
    # As save_pretrained sets them: the class to make, and the dtype to load in.
    dtypes = [one.dtype for one in module.parameters() if one.is_floating_point()]
    found[FILES["config"]]["architectures"] = [type(module).__name__]
    if dtypes:
        found[FILES["config"]]["dtype"] = str(dtypes[0]).removeprefix("torch.")
    return found
