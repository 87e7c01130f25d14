"""Checks of values in models of transformers, which are made before the step: in it they are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zerograph.errors import InputError


def check_labels(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise for labels that a model for the CTC loss refuses.

    Args:
        model: any model.
        inputs: this rank's rows, by name.

    Raises:
        InputError: a label is no class of the model.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or not labels.numel():
        return
    models: list[Any] = [one for one in model.modules() if type(one).__name__.endswith("ForCTC")]
    sizes = [int(one.config.vocab_size) for one in models]
    if sizes and (largest := int(labels.max())) >= min(sizes):
        raise InputError(f"a label is {largest}, and the model has the {min(sizes)} classes 0 to {min(sizes) - 1}")
