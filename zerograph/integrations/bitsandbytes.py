"""Linear layers of bitsandbytes with 8-bit weights, as layers whose weights can be sharded.

Such a layer keeps its weight in three places, and its scales in attributes of the weight. :class:`Int8Linear` has the
same numbers as one frozen parameter and one buffer.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd, nn

from zerograph.errors import ConfigError


class Int8Linear(nn.Module):
    """A linear layer with a frozen weight in 8 bits: ``x @ (weight * SCB / 127).T + bias``.

    Forward and backward each dequantise the weight, so no dequantised weight is kept between them.

    Args:
        weight: int8 [out_features, in_features].
        scale: the largest absolute value of each row [out_features].
        bias: a parameter [out_features], or None.

    Attributes:
        SCB: the scale, under the name that bitsandbytes gives it in files.
    """

    SCB: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("SCB", scale)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the dequantised weight, plus the bias."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        result: Tensor = _FrozenProduct.apply(input, self.weight, self.SCB, bias)
        return result

    def extra_repr(self) -> str:
        """Return the sizes, as ``nn.Linear`` does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _FrozenProduct(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, _dequantized(weight, scale, x), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        weight, scale = ctx.saved_tensors
        return gradient @ _dequantized(weight, scale, gradient), None, None, of_bias


def _dequantized(weight: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Return the weight in another tensor's dtype, in the order of operations of bitsandbytes."""
    return weight.to(like.dtype).mul_(scale.unsqueeze(1).mul(1 / 127))


def use_plain_linears(model: nn.Module) -> nn.Module:
    """Replace the 8-bit linear layers of bitsandbytes in a model, in place, by :class:`Int8Linear` with their values.

    The layers compute with dequantised weights, as those of bitsandbytes do on a CPU in training; on a GPU, and in
    evaluation, bitsandbytes also rounds activations to 8 bits.

    Args:
        model: quantized, and on its device. Adapters of PEFT may be on it already.

    Returns:
        The model; another module if the model itself is such a layer.

    Raises:
        ConfigError: a layer is not quantized yet or trains its weight, or an adapter reads the weight itself (DoRA).
            Nothing is changed.
    """
    # Without the import there are no such layers.
    layers = sys.modules.get("bitsandbytes.nn.modules")
    if layers is None:
        return model
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), layers.Linear8bitLt) and len(
            getattr(module, "lora_magnitude_vector", ())
        ):
            raise ConfigError(f"{name}: DoRA reads the weight of a layer in 8 bits: use LoRA, or a base in 16 bits")
    new = {
        module: _plain(name, module)
        for name, module in model.named_modules()
        if isinstance(module, layers.Linear8bitLt)
    }
    for parent in list(model.modules()):
        # A layer may have several names.
        for name, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, name, new[child])
    return new.get(model, model)


def _plain(name: str, layer: Any) -> Int8Linear:
    weight = layer.weight.detach().as_subclass(Tensor)
    scale = layer.state.SCB if getattr(layer.weight, "SCB", None) is None else layer.weight.SCB
    if layer.state.has_fp16_weights:
        raise ConfigError(f"{name} trains its weight in 16 bits: create it with has_fp16_weights=False")
    if weight.dtype.is_floating_point or scale is None:
        raise ConfigError(f"the weight of {name} is not quantized yet: move the model to its device first")
    plain = Int8Linear(weight, scale, layer.bias)
    return plain.train(layer.training)
