"""Normalisation and attention."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import Operands, rule

aten = torch.ops.aten


def _layer_norm(operands: Operands) -> str:
    norm = _norm_dims("c", len(operands["normalized_shape"]))
    parameters = ", ".join([norm] * (len(operands.inputs) - 1))
    ones = " ".join(["1"] * len(operands["normalized_shape"]))
    return f"... {norm}{', ' if parameters else ''}{parameters} -> ... {norm}, ... {ones}, ... {ones}"


def _layer_norm_backward(operands: Operands) -> str:
    norm = _norm_dims("c", len(operands["normalized_shape"]))
    ones = " ".join(["1"] * len(operands["normalized_shape"]))
    parameters = [norm] * (len(operands.inputs) - 4)
    inputs = [f"... {norm}", f"... {norm}", f"... {ones}", f"... {ones}", *parameters]
    asked = operands["output_mask"]
    outputs = [text for text, wanted in zip([f"... {norm}", norm, norm], asked, strict=True) if wanted]
    return ", ".join(inputs) + " -> " + ", ".join(outputs)


def _norm_dims(letter: str, count: int) -> str:
    return " ".join(f"{letter}{i}!" for i in range(count))


rule(aten.native_layer_norm.default, _layer_norm)
rule(aten.native_layer_norm_backward.default, _layer_norm_backward, linear=(0,))


def _group_norm(operands: Operands) -> str:
    rest = "".join(f" w{i}!" for i in range(operands.inputs[0].dim() - 2))
    parameters = "".join(", c!" for _ in operands.inputs[1:])
    return f"n c!{rest}{parameters} -> n c!{rest}, n g!, n g!"


def _group_norm_backward(operands: Operands) -> str:
    rest = "".join(f" w{i}!" for i in range(operands.inputs[0].dim() - 2))
    weight = "".join(", c!" for _ in operands.inputs[4:])
    outputs = [f"n c!{rest}", "c!", "c!"]
    wanted = [text for text, asked in zip(outputs, operands["output_mask"], strict=True) if asked]
    return f"n c!{rest}, n c!{rest}, n g!, n g!{weight} -> " + ", ".join(wanted)


rule(aten.native_group_norm.default, _group_norm)
rule(aten.native_group_norm_backward.default, _group_norm_backward, linear=(0,))

# Scaled dot product attention: batch and heads are free, positions and channels are not.
rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda operands: "b h q! d!, b h k! d!, b h k! e!" + _mask(operands, 3) + " -> b h q! e!, b h q!",
)
rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    lambda operands: (
        "b h q! e!, b h q! d!, b h k! d!, b h k! e!, b h q! e!, b h q!"
        + _mask(operands, 6)
        + " -> b h q! d!, b h k! d!, b h k! e!"
    ),
)


def _mask(operands: Operands, position: int) -> str:
    if len(operands.inputs) <= position:
        return ""
    return ", " + {2: "q! k!", 4: "b h q! k!"}[operands.inputs[position].dim()]
