"""Optimizers as users write them: for one device, with no thought of ranks. None is elementwise but Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, state in _each(self):
            if not state:
                state["momentum"] = torch.zeros_like(param)
            first, second = group["betas"]
            param.mul_(1 - group["lr"] * group["decay"])
            param.sub_(group["lr"] * torch.sign(state["momentum"].lerp(param.grad, 1 - first)))
            state["momentum"].lerp_(param.grad, 1 - second)


class Lamb(Optimizer):
    """You et al., arXiv 1904.00962: Adam's step, as long as the parameter."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, state in _each(self):
            if not state:
                state["step"] = torch.tensor(0.0)
                state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
            first, second = group["betas"]
            state["step"] += 1
            count = state["step"].item()
            state["mean"].lerp_(param.grad, 1 - first)
            state["square"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
            mean, square = state["mean"] / (1 - first**count), state["square"] / (1 - second**count)
            update = mean / (square.sqrt() + 1e-6) + group["decay"] * param
            length, step = param.norm(), update.norm()
            trust = torch.where((length > 0) & (step > 0), length / step, torch.ones_like(step))
            param.sub_(group["lr"] * trust * update)


class Lars(Optimizer):
    """You et al., arXiv 1708.03888: momentum, with the gradient in proportion to the parameter's length."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, trust: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, state in _each(self):
            grad = param.grad
            # Biases and norms are left as they are, as everybody does: an elementwise update.
            if param.dim() > 1:
                grad = grad * (group["trust"] * param.norm() / (grad.norm() + 1e-9))
            if not state:
                state["momentum"] = grad.clone()
            else:
                state["momentum"].mul_(group["momentum"]).add_(grad)
            param.sub_(group["lr"] * state["momentum"])


class Shampoo(Optimizer):
    """Gupta et al., arXiv 1802.09568, with the full matrix of every dimension, inverted by ``eigh``."""

    def __init__(self, params: Any, lr: float, epsilon: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, state in _each(self):
            update = param.grad
            for dim, size in enumerate(param.shape):
                if f"statistics{dim}" not in state:
                    state[f"statistics{dim}"] = group["epsilon"] * torch.eye(size, dtype=param.dtype)
                rows = update.movedim(dim, 0).reshape(size, -1)
                gradient = param.grad.movedim(dim, 0).reshape(size, -1)
                state[f"statistics{dim}"].add_(gradient @ gradient.T)
                update = _root(state[f"statistics{dim}"], -0.5 / param.dim()) @ rows
                shape = [size, *(other for index, other in enumerate(param.shape) if index != dim)]
                update = update.reshape(shape).movedim(0, dim)
            param.sub_(group["lr"] * update)


class Assigning(Optimizer):
    """Assigns state and parameters instead of changing them in place, and swaps two entries."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, state in _each(self):
            if not state:
                state["step"], state["mean"], state["last"] = 0, torch.zeros_like(param), param.grad
            state["step"] = state["step"] + 1
            state["mean"] = 0.9 * state["mean"] + param.grad
            param.data = param - group["lr"] * (state["mean"] + state["last"]) / state["step"]
            state["mean"], state["last"] = param.grad.sign() * state["last"], state["mean"]


class Branching(Optimizer):
    """Branches on its step count and on values; turns matrices by a factorization in every second step, as SOAP."""

    def __init__(self, params: Any, lr: float, turns: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.turns = turns

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param, state in _each(self):
            state["step"] = state.get("step", 0) + 1
            update = param.grad
            if "mean" not in state:
                state["mean"] = torch.zeros_like(param)
            if state["step"] > 2:
                update = update + state["mean"]
                if state["step"] % 2 == 0 and group["lr"] > 0:
                    state["mean"] = update / 2
                    update = update.sign()
            if self.turns and param.dim() == 2:
                if "bases" not in state:
                    state["bases"], state["every"] = [torch.eye(param.shape[0], dtype=param.dtype), []], 2
                if state["step"] % state["every"] == 1:
                    rows = update @ state["bases"][0] + 3 * torch.eye(7, dtype=param.dtype)
                    state["bases"] = [torch.linalg.qr(rows)[0], []]
                update = state["bases"][0] @ update
                if update.norm() > 1:
                    update /= update.norm()
            param.sub_(group["lr"] * update)


class GlobalNorm(Optimizer):
    """Normalises by the norm of all gradients together: no parameter can be updated for itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [param.grad for _, param, _ in _each(self)]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group, param, _ in _each(self):
            param.sub_(group["lr"] * param.grad / norm)


def _each(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], Any, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield group, param, optimizer.state[param]


def _root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**power) @ vectors.T
