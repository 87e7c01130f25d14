"""OneFlow's optimizers, with its defaults, options and arithmetic, over torch's classes.

If both compute the same, torch's update runs. The other formulas are those of OneFlow's kernels
(``oneflow/user/kernels/model_update_kernel_util.h``); each class documents the differences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerograph.compat.oneflow.optim.base import TableOptimizer, check, counted, gradient_of, moments, zeros
from zerograph.errors import ConfigError


class SGD(TableOptimizer, torch.optim.SGD):
    """SGD. Dampening applies from the first step on.

    ``maximize`` negates the update, not the gradient, and has an effect only with a momentum. Nesterov momentum may be
    combined with dampening. Torch's other arguments are accepted too.
    """

    arguments = {
        "lr": 0.001,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }

    def _construct(self, params: Any, values: dict[str, Any]) -> None:
        # Torch refuses nesterov with dampening, so the groups get it after the constructor.
        nesterov, params = values.pop("nesterov"), list(params)
        has_own = [isinstance(group, dict) and "nesterov" in group for group in params]
        super()._construct(params, values)
        self.defaults["nesterov"] = nesterov
        for group, own in zip(self.param_groups, has_own, strict=False):
            group["nesterov"] = group["nesterov"] if own else nesterov

    def _update(self, group: dict[str, Any]) -> None:
        if group["momentum"] == 0 or (group["dampening"] == 0 and not group["maximize"]):
            self._update_as(torch.optim.SGD, {**group, "maximize": False})
        else:
            super()._update(group)

    def _update_parameter(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum, dampening, maximize = group["momentum"], group["dampening"], group["maximize"]
        gradient = gradient_of(parameter, group["weight_decay"])
        (buffer,) = zeros(state, parameter, "momentum_buffer")
        buffer.mul_(momentum).add_(gradient, alpha=1 - dampening)
        step = group["lr"] * (gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer)
        if maximize:
            parameter.add_(step)
        else:
            parameter.sub_(step)


class Adam(TableOptimizer, torch.optim.Adam):
    """Adam, without bias correction of the moments if ``do_bias_correction=False``."""

    # The torch optimizer whose step runs when the moments are bias-corrected.
    _corrected: type[torch.optim.Optimizer] = torch.optim.Adam

    arguments = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "do_bias_correction": True,
    }

    def _update(self, group: dict[str, Any]) -> None:
        if group["do_bias_correction"]:
            self._update_as(self._corrected, group)
        else:
            super()._update(group)

    def _update_parameter(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        decoupled = self._corrected is torch.optim.AdamW
        l2 = 0.0 if decoupled else decay
        counted(state)
        gradient = gradient_of(parameter, -l2).neg() if group["maximize"] else gradient_of(parameter, l2)
        first, second = moments(state, parameter, gradient, group["betas"])
        if group["amsgrad"]:
            (largest,) = zeros(state, parameter, "max_exp_avg_sq")
            largest.copy_(torch.maximum(largest, second))
            second = largest
        if decoupled and decay != 0:
            parameter.mul_(1 - lr * decay)
        parameter.sub_(lr * (first / second.sqrt().add_(group["eps"])))


class AdamW(Adam, torch.optim.AdamW):
    """AdamW with decoupled weight decay, whose default is 0 (torch's: 0.01)."""

    _corrected = torch.optim.AdamW


class RMSprop(TableOptimizer, torch.optim.RMSprop):
    """RMSprop with ``eps`` inside the square root, and without momentum.

    Raises:
        ConfigError: a momentum is passed, which OneFlow refuses too.
    """

    arguments = {"lr": 0.001, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}

    def _construct(self, params: Any, values: dict[str, Any]) -> None:
        super()._construct(params, values)
        for group in self.param_groups:
            if group["momentum"] != 0:
                raise ConfigError(
                    f"flow.optim.RMSprop(momentum={group['momentum']!r}): OneFlow's has no momentum\n"
                    "torch.optim.RMSprop has, with eps outside the square root."
                )

    def _update_parameter(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        alpha = group["alpha"]
        counted(state)
        gradient = gradient_of(parameter, group["weight_decay"])
        (square,) = zeros(state, parameter, "square_avg")
        square.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        variance = square
        if group["centered"]:
            (mean,) = zeros(state, parameter, "grad_avg")
            mean.lerp_(gradient, 1 - alpha)
            variance = square - mean * mean
        parameter.sub_(group["lr"] * (gradient * (variance + group["eps"]).rsqrt()))


class Adagrad(TableOptimizer, torch.optim.Adagrad):
    """Adagrad with the default learning rate 0.001 (torch's: 0.01)."""

    arguments = {"lr": 0.001, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}

    def _construct(self, params: Any, values: dict[str, Any]) -> None:
        super()._construct(params, values)
        # Torch initialises the sums of all groups from the argument.
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"].fill_(group["initial_accumulator_value"])

    def _update(self, group: dict[str, Any]) -> None:
        self._update_as(torch.optim.Adagrad, group)


class Adadelta(TableOptimizer, torch.optim.Adadelta):
    """Adadelta, with torch's arithmetic."""

    arguments = {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False}

    def _update(self, group: dict[str, Any]) -> None:
        self._update_as(torch.optim.Adadelta, group)


class LAMB(TableOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): Adam's update, scaled to the norm of the parameter.

    Args:
        params: the parameters or parameter groups.
        lr: the learning rate.
        betas: coefficients of the two moving averages.
        eps: added to the denominator.
        weight_decay: the weight decay.
        adam_w_mode: decouple the weight decay from the gradient. The trust ratio scales it, but does not depend on it.
        do_bias_correction: correct the bias of the moments.
        amsgrad: not supported, as in OneFlow.
        contiguous_params: no effect.

    Raises:
        ConfigError: ``amsgrad`` is True, or a number is out of its range.
    """

    arguments = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "adam_w_mode": True,
        "do_bias_correction": True,
        "amsgrad": False,
    }

    def _construct(self, params: Any, values: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check("LAMB", name, values[name], float(values[name]) >= 0)
        for beta in values["betas"]:
            check("LAMB", "betas", beta, 0 <= beta < 1)
        check("LAMB", "amsgrad", values["amsgrad"], not values["amsgrad"])
        super()._construct(params, values)

    def _update_parameter(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        number = counted(state)
        gradient = gradient_of(parameter, 0.0 if group["adam_w_mode"] else decay)
        first, second = moments(state, parameter, gradient, (beta1, beta2))
        if group["do_bias_correction"]:
            denominator = second.sqrt() / (1 - beta2**number) ** 0.5 + group["eps"]
            update = first / (1 - beta1**number) / denominator
        else:
            update = first / (second.sqrt() + group["eps"])
        length, change = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        ratio = torch.where((length > 0) & (change > 0), length / change, torch.ones_like(length))
        if group["adam_w_mode"] and decay != 0:
            update = update.add(parameter, alpha=decay)
        parameter.sub_(group["lr"] * ratio * update)


class FTRL(TableOptimizer):
    """FTRL-proximal, as in ``oneflow.one_embedding``.

    Args:
        params: the parameters or parameter groups.
        lr: the learning rate.
        weight_decay: the weight decay.
        lr_power: exponent of the accumulated squares.
        initial_accumulator_value: initial value of the accumulated squares.
        lambda1: strength of the L1 regularization.
        lambda2: strength of the L2 regularization.
        beta: added to the accumulated squares' power.

    Raises:
        ConfigError: a number is out of its range.
    """

    arguments = {
        "lr": 0.001,
        "weight_decay": 0.0,
        "lr_power": -0.5,
        "initial_accumulator_value": 0.1,
        "lambda1": 0.0,
        "lambda2": 0.0,
        "beta": 0.0,
    }

    def _construct(self, params: Any, values: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check("FTRL", name, values[name], float(values[name]) >= 0)
        super()._construct(params, values)

    def _update_parameter(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        lr, power, lambda1 = group["lr"], group["lr_power"], group["lambda1"]
        if "accumulator_value" not in state:
            state["accumulator_value"] = torch.full_like(parameter, group["initial_accumulator_value"])
        accumulated = state["accumulator_value"]
        (z,) = zeros(state, parameter, "z")
        gradient = gradient_of(parameter, group["weight_decay"])
        before = accumulated.pow(power)
        accumulated.add_(gradient * gradient)
        after = accumulated.pow(power)
        z.add_(gradient - (after - before) / lr * parameter)
        moved = (z.sign() * lambda1 - z) / ((after + group["beta"]) / lr + group["lambda2"])
        parameter.copy_(torch.where(z.abs() < lambda1, torch.zeros_like(moved), moved))
