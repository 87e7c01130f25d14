"""Updates of OneFlow's optimizers in numpy, from the formulas of its documentation and the facts of its tests.

Each takes the parameter, its gradient, the state (a dict, empty at first) and the group's options, and returns the new
parameter. The state counts steps in ``number``, from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Update = Callable[[Array, Array, dict[str, Any], dict[str, Any]], Array]


def clipped(gradient: Array, option: dict[str, Any]) -> Array:
    """The gradient, shortened if the group says so."""
    if "clip_grad_max_norm" not in option:
        return gradient
    norm = np.linalg.norm(gradient.ravel(), option["clip_grad_norm_type"])
    return gradient * min(1.0, option["clip_grad_max_norm"] / (norm + 1e-6))


def _kept(state: dict[str, Any], name: str, like: Array, value: float = 0.0) -> Array:
    return state.setdefault(name, np.full_like(like, value))


def sgd(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    g = g + option["weight_decay"] * x
    momentum = option["momentum"]
    if momentum == 0:
        return x - option["lr"] * g
    state["v"] = momentum * _kept(state, "v", x) + (1 - option["dampening"]) * g
    step = option["lr"] * (g + momentum * state["v"] if option["nesterov"] else state["v"])
    return x + step if option["maximize"] else x - step


def _moments(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> tuple[Array, Array, float, float]:
    beta1, beta2 = option["betas"]
    state["m"] = beta1 * _kept(state, "m", x) + (1 - beta1) * g
    state["v"] = beta2 * _kept(state, "v", x) + (1 - beta2) * g * g
    corrected, number = option["do_bias_correction"], state["number"]
    first, second = (1 - beta1**number, 1 - beta2**number) if corrected else (1.0, 1.0)
    return state["m"], state["v"], first, second


def _adam_step(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    m, v, first, second = _moments(x, g, state, option)
    if option["amsgrad"]:
        state["largest"] = v = np.maximum(_kept(state, "largest", x), v)
    return option["lr"] / first * m / (np.sqrt(v) / np.sqrt(second) + option["eps"])


def adam(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    return x - _adam_step(x, g + option["weight_decay"] * x, state, option)


def adamw(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    return x - _adam_step(x, g, state, option) - option["lr"] * option["weight_decay"] * x


def rmsprop(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    g, alpha = g + option["weight_decay"] * x, option["alpha"]
    state["r"] = alpha * _kept(state, "r", x) + (1 - alpha) * g * g
    under = state["r"] + option["eps"]
    if option["centered"]:
        state["mean"] = alpha * _kept(state, "mean", x) + (1 - alpha) * g
        under = under - state["mean"] ** 2
    return x - option["lr"] / np.sqrt(under) * g


def adagrad(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    g = g + option["weight_decay"] * x
    state["s"] = _kept(state, "s", x, option["initial_accumulator_value"]) + g * g
    lr = option["lr"] / (1 + (state["number"] - 1) * option["lr_decay"])
    return x - lr / (np.sqrt(state["s"]) + option["eps"]) * g


def adadelta(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    g, rho, eps = g + option["weight_decay"] * x, option["rho"], option["eps"]
    state["s"] = rho * _kept(state, "s", x) + (1 - rho) * g * g
    delta = np.sqrt(_kept(state, "d", x) + eps) / np.sqrt(state["s"] + eps) * g
    state["d"] = rho * state["d"] + (1 - rho) * delta * delta
    return x - option["lr"] * delta


def lamb(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    decay = option["weight_decay"]
    m, v, first, second = _moments(x, g if option["adam_w_mode"] else g + decay * x, state, option)
    update = m / first / (np.sqrt(v) / np.sqrt(second) + option["eps"])
    length, change = np.linalg.norm(x), np.linalg.norm(update)
    ratio = length / change if length > 0 and change > 0 else 1.0
    return x - option["lr"] * ratio * (update + (decay * x if option["adam_w_mode"] else 0.0))


def ftrl(x: Array, g: Array, state: dict[str, Any], option: dict[str, Any]) -> Array:
    g, lr, power = g + option["weight_decay"] * x, option["lr"], option["lr_power"]
    before = _kept(state, "n", x, option["initial_accumulator_value"])
    state["n"] = before + g * g
    z = _kept(state, "z", x) + g - (state["n"] ** power - before**power) / lr * x
    state["z"] = z
    moved = (np.sign(z) * option["lambda1"] - z) / ((option["beta"] + state["n"] ** power) / lr + option["lambda2"])
    return np.where(np.abs(z) < option["lambda1"], 0.0, moved)


def trained(update: Update, start: Array, gradients: list[Array], option: dict[str, Any]) -> list[Array]:
    """The parameter after each step."""
    x, state, after = start, {}, []
    for number, gradient in enumerate(gradients, 1):
        state["number"] = number
        x = update(x, clipped(gradient, option), state, option)
        after.append(x)
    return after
