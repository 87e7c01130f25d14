"""Normalization and attention."""

from __future__ import annotations

from itertools import compress

import torch

from zerograph.ops.attention import ACCELERATED, BACKWARD, FORWARD, repeat_heads, sum_heads
from zerograph.ops.flex_attention import BATCH, HEADS, flex_attention as FLEX, flex_attention_backward as FLEX_BACKWARD
from zerograph.passes.rules.registry import Operands, joined, rule

aten = torch.ops.aten


def _layer_norm(operands: Operands) -> str:
    norm = _norm_dims(len(operands["normalized_shape"]))
    parameters = ", ".join([norm] * (len(operands.inputs) - 1))
    ones = " ".join(["1"] * len(operands["normalized_shape"]))
    return f"... {norm}{', ' if parameters else ''}{parameters} -> ... {norm}, ... {ones}, ... {ones}"


def _layer_norm_backward(operands: Operands) -> str:
    norm = _norm_dims(len(operands["normalized_shape"]))
    ones = " ".join(["1"] * len(operands["normalized_shape"]))
    parameters = [norm] * (len(operands.inputs) - 4)
    inputs = [f"... {norm}", f"... {norm}", f"... {ones}", f"... {ones}", *parameters]
    outputs = compress([f"... {norm}", norm, norm], operands["output_mask"])
    return ", ".join(inputs) + " -> " + ", ".join(outputs)


def _norm_dims(count: int) -> str:
    return " ".join(f"c{i}!" for i in range(count))


rule(aten.native_layer_norm.default, _layer_norm)
rule(aten.native_layer_norm_backward.default, _layer_norm_backward, linear=(0,))


def _group_norm(operands: Operands) -> str:
    window = "".join(f" w{i}!" for i in range(operands.inputs[0].dim() - 2))
    parameters = "".join(", c!" for _ in operands.inputs[1:])
    return f"n c!{window}{parameters} -> n c!{window}, n g!, n g!"


def _group_norm_backward(operands: Operands) -> str:
    window = "".join(f" w{i}!" for i in range(operands.inputs[0].dim() - 2))
    weight = "".join(", c!" for _ in operands.inputs[4:])
    outputs = compress([f"n c!{window}", "c!", "c!"], operands["output_mask"])
    return f"n c!{window}, n c!{window}, n g!, n g!{weight} -> " + ", ".join(outputs)


rule(aten.native_group_norm.default, _group_norm)
rule(aten.native_group_norm_backward.default, _group_norm_backward, linear=(0,))


# Scaled dot product attention: batch, heads and queries can be split, keys and channels cannot. A causal mask of split
# queries begins at their position; see zerograph/ops/attention.py.
def _for_cpu(operands: Operands) -> tuple[list[str], list[str]]:
    """Return the factors of query, key and value, and those of a mask if there is one.

    Several heads of queries may share one of keys.
    """
    backward = "grad_out" in operands.arguments
    query, key = operands.inputs[backward], operands.inputs[backward + 1]
    heads = "h" if query.shape[1] == key.shape[1] else "(h g)"
    masks = operands.inputs[6 if backward else 3 :]
    texts = {2: "q k!", 4: "b 1 q k!" if masks and masks[0].shape[1] == 1 else f"b {heads} q k!"}
    return [f"b {heads} q d!", "b h k! d!", "b h k! e!"], [texts[mask.dim()] for mask in masks]


def _for_cpu_forward(operands: Operands) -> str:
    tensors, masks = _for_cpu(operands)
    out = tensors[0].replace("d!", "e!")
    return ", ".join([*tensors, *masks]) + f" -> {out}, {out.removesuffix(' e!')}"


def _for_cpu_backward(operands: Operands) -> str:
    tensors, masks = _for_cpu(operands)
    out = tensors[0].replace("d!", "e!")
    saved = [out, out.removesuffix(" e!")]
    return ", ".join([out, *tensors, *saved, *masks]) + " -> " + ", ".join(tensors)


rule(FORWARD, _for_cpu_forward, batch=4)
rule(BACKWARD, _for_cpu_backward, batch=4)


def _attention(operands: Operands) -> str:
    """Return the notation of attention on accelerators: batch and heads can be split, positions and channels cannot.

    Queries, keys, values, masks and results have four dimensions, their log-sum-exp three or four. The state of a
    random generator is whole. Several heads of queries may share one of keys.
    """
    values = (*operands.inputs, *operands.outputs)
    counts = {value.shape[1] for value in values if value.dim() == 4 and value.shape[1] != 1}
    operand_texts = []
    for number, value in enumerate(values):
        heads = "(h g)" if len(counts) > 1 and value.dim() > 1 and value.shape[1] == max(counts) else "h"
        own = [f"v{number}x{i}!" for i in range(value.dim())]
        operand_texts.append(" ".join(["b", heads, *own[2:]] if value.dim() in (3, 4) else own))
    return joined(operands, operand_texts)


for _forward, _backward in ACCELERATED.items():
    rule(_forward, _attention, batch=4)
    rule(_backward, _attention, linear=(0,), batch=4)


def _flex(operands: Operands) -> list[str]:
    """Return the factors of query, key, value and captured tensors.

    Several heads of queries share one of keys. A captured tensor has the axes that it is looked up by.
    """
    letters = {BATCH: "b", HEADS: "(h g)"}
    captured = [
        " ".join(letters.get(axis, f"c{number}x{dim}!") for dim, axis in enumerate(axes))
        for number, axes in enumerate(operands["axes"])
    ]
    return ["b (h g) q! d!", "b h k! d!", "b h k! e!", *captured]


def _flex_backward(operands: Operands) -> str:
    first = 1 if operands["grad_lse"] is None else 2
    tensors = _flex(operands)
    gradients = ["b (h g) q! e!", "b (h g) q!"][:first]
    outputs = [*tensors[:3], *(tensors[3 + index] for index in operands["differentiable"])]
    return ", ".join([*gradients, *tensors]) + " -> " + ", ".join(outputs)


rule(FLEX, lambda operands: ", ".join(_flex(operands)) + " -> b (h g) q! e!, b (h g) q!")
rule(
    FLEX_BACKWARD,
    _flex_backward,
    linear=lambda operands: (0,) if operands["grad_lse"] is None else ((0, 1),),
)

rule(repeat_heads, lambda operands: f"b h s c -> b (h r:{operands['times']}) s c", linear=(0,))
rule(sum_heads, lambda operands: f"b (h r:{operands['times']}) s c -> b h s c", linear=(0,))
