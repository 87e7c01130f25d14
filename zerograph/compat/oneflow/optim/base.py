"""The base class of OneFlow's optimizers, with clipping of groups, ``lr_scale``, and the call of torch's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base.source import refusal, warn_user
from zerograph.compat.notices import call_without_effect
from zerograph.errors import ConfigError
from zerograph.graph import building

_NORM, _TYPE = "clip_grad_max_norm", "clip_grad_norm_type"


class Optimizer(torch.optim.Optimizer):
    """An optimizer with OneFlow's options; :meth:`_update` computes one group's update.

    A group may have ``clip_grad_max_norm`` together with ``clip_grad_norm_type``, and ``lr_scale``. As in OneFlow, a
    graph multiplies the group's learning rate by ``lr_scale``, and ``step()`` outside a graph does not.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                lr = group["lr"]
                if "lr_scale" in group and torch.compiler.is_compiling():
                    group["lr"] = lr * group["lr_scale"]
                try:
                    self._update(group)
                finally:
                    group["lr"] = lr
        return loss

    def clip_grad(self, error_if_nonfinite: bool = False) -> None:
        """Clip the gradients of each group that has ``clip_grad_max_norm`` and ``clip_grad_norm_type``, outside graphs.

        Args:
            error_if_nonfinite: raise if a norm is infinite or NaN.

        Raises:
            CaptureError: the call is inside ``build()``, where the graph clips after ``backward()``.
        """
        if building():
            raise refusal(
                "build() calls clip_grad()",
                "A graph clips the groups that have clip_grad_max_norm and clip_grad_norm_type by itself: leave it "
                "out.",
            )
        for group in self.param_groups:
            if group.get(_NORM) is None or group.get(_TYPE) is None:
                warn_user(f"clip_grad() clips groups that have {_NORM} and {_TYPE}: give both to {type(self).__name__}")
            else:
                norm, kind = float(group[_NORM]), float(group[_TYPE])
                nn.utils.clip_grad_norm_(group["params"], norm, kind, error_if_nonfinite=error_if_nonfinite)

    def _update(self, group: dict[str, Any]) -> None:
        """Update the group's parameters in place, with ``group["lr"]``."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update_parameter(parameter, self.state[parameter], group)

    def _update_parameter(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter that has a gradient, and its state, in place."""
        raise NotImplementedError

    def _update_as(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
        """Update the group as torch's class does."""
        groups = self.param_groups
        self.param_groups = [dict(group)]
        try:
            _torch.unhooked_step(kind)(self)
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state from torch's own class lacks OneFlow's options.
        for group in self.param_groups:
            for key in _OWN & self.defaults.keys():
                group.setdefault(key, self.defaults[key])


# Options that torch's classes of the same name do not have.
_OWN = {"do_bias_correction", "adam_w_mode"}


def signature_of(table: Mapping[str, Any], *, takes_more: bool = False) -> Signature:
    """Return the signature of a constructor whose arguments are a table, in order, with their defaults."""
    named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in table.items()]
    return Signature([*named, *([Parameter("options", Parameter.VAR_KEYWORD)] if takes_more else [])])


def arguments_of(signature: Signature, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each argument by name."""
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    more = bound.arguments.pop("options", {})
    return {**bound.arguments, **more}


class TableOptimizer(Optimizer):
    """An optimizer whose arguments are a table. Arguments of torch's class of the same name are accepted too.

    Attributes:
        arguments: the arguments after the parameters, in OneFlow's order and with its defaults.
    """

    arguments: Mapping[str, Any] = {}
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        table = {"params": Parameter.empty, **cls.arguments, "contiguous_params": False}
        cls.__signature__ = signature_of(table, takes_more=not cls._is_own())

    def __init__(self, *args: Any, **options: Any) -> None:
        values = arguments_of(type(self).__signature__, args, options)
        if values.pop("contiguous_params"):
            call_without_effect("contiguous_params=True", "a bucket is always updated at once")
        # OneFlow's False leaves the choice to torch.
        if not values.get("fused", True):
            values["fused"] = None
        self._construct(values.pop("params"), values)

    def _construct(self, params: Any, values: dict[str, Any]) -> None:
        """Call the constructor of torch's class, and add the options that it does not have to the groups."""
        if self._is_own():
            super().__init__(params, values)
            return
        own = {key: values.pop(key) for key in _OWN & values.keys()}
        super().__init__(params, **values)
        self.defaults.update(own)
        for group in self.param_groups:
            group.update({key: group.get(key, value) for key, value in own.items()})

    @classmethod
    def _is_own(cls) -> bool:
        """Return whether it extends no optimizer of torch's."""
        return [kind for kind in cls.__mro__ if kind.__module__.startswith("torch.")] == [torch.optim.Optimizer]


def check_options(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a group has an option of OneFlow's that this optimizer would ignore.

    Raises:
        ConfigError: the message names the group and the option.
    """
    scales = isinstance(optimizer, Optimizer)
    for number, group in enumerate(optimizer.param_groups):
        ignored = sorted(key for key in _OWN if key in group and key not in optimizer.defaults)
        if "lr_scale" in group and not scales:
            ignored.append("lr_scale")
        if ignored:
            kind = type(optimizer)
            raise ConfigError(
                f"group {number} of {kind.__module__}.{kind.__qualname__} has {', '.join(ignored)}, which it ignores\n"
                "Leave it out, or use an optimizer of flow.optim that has it: docs/oneflow.md lists them."
            )


def check_clipping(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a group has only one of the two clipping options, or a norm that is not a positive number.

    Raises:
        ConfigError: the message names the group and the option.
    """
    for number, group in enumerate(optimizer.param_groups):
        options = [name for name in (_NORM, _TYPE) if group.get(name) is not None]
        if len(options) == 1:
            missing = _TYPE if options[0] == _NORM else _NORM
            raise ConfigError(
                f"group {number} of {type(optimizer).__name__} has {options[0]}, but no {missing}: give both"
            )
        if options and not (isinstance(group[_NORM], (int, float)) and group[_NORM] > 0):
            raise ConfigError(f"{_NORM} = {group[_NORM]!r}: give the largest norm that gradients may have, more than 0")


def clip(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Clip the gradients of each group with clipping options. Call it in ``build()``, after ``backward()``."""
    for group in _groups(optimizers):
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if parameters and group.get(_NORM) is not None:
            nn.utils.clip_grad_norm_(parameters, float(group[_NORM]), float(group[_TYPE]))


def clipping_facts(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return a text that is equal for groups that :func:`clip` treats equally.

    Raises:
        ConfigError: as :func:`check_clipping`.
    """
    for optimizer in optimizers:
        check_clipping(optimizer)
    groups = _groups(optimizers)
    return ", ".join("no" if group.get(_NORM) is None else f"{group[_NORM]} in norm {group[_TYPE]}" for group in groups)


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def gradient_of(parameter: nn.Parameter, l2: float) -> Tensor:
    """Return the parameter's gradient, plus ``l2`` times the parameter."""
    assert parameter.grad is not None
    return parameter.grad.add(parameter, alpha=l2) if l2 != 0 else parameter.grad


def zeros(state: dict[str, Any], parameter: nn.Parameter, *names: str) -> list[Tensor]:
    """Return entries of a parameter's state, creating missing ones as zeros."""
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return [state[name] for name in names]


def moments(
    state: dict[str, Any], parameter: nn.Parameter, gradient: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Update and return Adam's moving averages of the gradient and of its square, each in the parameter's shape."""
    beta1, beta2 = betas
    first, second = zeros(state, parameter, "exp_avg", "exp_avg_sq")
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return first, second


def counted(state: dict[str, Any]) -> float:
    """Increment the step count in a parameter's state, and return it."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    state["step"] += 1
    number: float = state["step"].item()
    return number


def check(kind: str, name: str, value: Any, good: bool) -> None:
    """Raise if a hyperparameter is out of its range.

    Args:
        kind: the optimizer's name.
        good: whether the value is in its range.

    Raises:
        ConfigError: it is not.
    """
    if not good:
        raise ConfigError(f"flow.optim.{kind}({name}={value!r}): no such value")
