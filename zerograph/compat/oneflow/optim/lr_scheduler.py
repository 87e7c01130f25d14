"""``flow.optim.lr_scheduler``: OneFlow's schedulers, over torch's.

OneFlow computes a rate from the initial rate and the number of the update. A class that computes as torch's is torch's
with OneFlow's arguments ``last_step`` and ``verbose``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

import torch

from zerograph import _torch
from zerograph.base.options import is_whole_number
from zerograph.compat.notices import call_without_effect
from zerograph.compat.oneflow.names import names_of
from zerograph.compat.oneflow.optim.base import arguments_of, signature_of
from zerograph.compat.schedules import ClosedSchedule
from zerograph.errors import ConfigError

_Plain = torch.optim.lr_scheduler.LRScheduler


class LRScheduler(ClosedSchedule):
    """A scheduler whose rates :meth:`rate` computes from the initial rate and the number of the update.

    Parameters of :meth:`rate` after these two are arguments of the constructor, between ``optimizer`` and
    ``last_step``, and attributes of the scheduler.

    Args:
        optimizer: the optimizer.
        last_step: the number of the last update; -1 before the first.
        verbose: no effect.

    Attributes:
        ranges: by argument, whether it has a possible value, and the possible ones for messages.
    """

    ranges: Mapping[str, _Range] = {}
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        if "__init__" not in vars(cls):
            cls.__signature__ = cls._arguments()

    @classmethod
    def _arguments(cls) -> Signature:
        own = list(signature(cls.rate).parameters.values())[3:]
        table = {argument.name: argument.default for argument in own}
        return signature_of({"optimizer": Parameter.empty, **table, "last_step": -1, "verbose": False})

    def __init__(self, *args: Any, **options: Any) -> None:
        values = arguments_of(self._arguments(), args, options)
        optimizer, last_step = values.pop("optimizer"), values.pop("last_step")
        _note_verbose(values.pop("verbose"))
        for name, (is_possible, possible) in self.ranges.items():
            _check(is_possible(values[name]), f"{type(self).__name__}({name}={values[name]!r}): {possible}")
        vars(self).update(values)
        self._names = tuple(values)
        super().__init__(optimizer, last_step)

    @property
    def last_step(self) -> int:
        """Number of the update that the rates are for, from 0."""
        return self.last_epoch

    def rate(self, base_lr: float, step: int) -> float:
        """Return the learning rate of update ``step``, from 0, of a group whose initial rate is ``base_lr``."""
        raise NotImplementedError

    def rates(self, base_lrs: Sequence[Any], step: int) -> list[Any]:
        """Return the learning rate of each group for update number ``step``, from 0."""
        values = {name: getattr(self, name) for name in self._names}
        return [self.rate(float(base_lr), step, **values) for base_lr in base_lrs]


_Range = tuple[Callable[[Any], bool], str]
_FACTOR: _Range = (lambda value: 0 <= value <= 1), "a number from 0 to 1"
_STEPS: _Range = (lambda value: value is not None and value > 0), "the number of steps, more than 0"
_WHOLE: _Range = (lambda value: is_whole_number(value, 1)), "a whole number from 1 up"


class ConstantLR(LRScheduler):
    """``factor`` times the initial rate for ``total_iters`` steps, then the initial rate."""

    ranges = {"factor": _FACTOR}

    def rate(self, base_lr: float, step: int, factor: float = 1.0 / 3, total_iters: int = 5) -> float:
        """Return the learning rate of ``step``, from 0."""
        return base_lr * factor if step < total_iters else base_lr


class LinearLR(LRScheduler):
    """A line from ``start_factor`` to ``end_factor`` times the initial rate, over ``total_iters`` steps."""

    ranges = {"start_factor": _FACTOR, "end_factor": _FACTOR}

    def rate(
        self, base_lr: float, step: int, start_factor: float = 1.0 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> float:
        """Return the learning rate of ``step``, from 0."""
        if step >= total_iters:
            return base_lr * end_factor
        return base_lr * (start_factor + (end_factor - start_factor) * (step / total_iters))


class CosineDecayLR(LRScheduler):
    """A half cosine from the initial rate to ``alpha`` times it, over ``decay_steps``."""

    ranges = {"decay_steps": _STEPS}

    def rate(self, base_lr: float, step: int, decay_steps: int, alpha: float = 0.0) -> float:  # type: ignore[override]
        """Return the learning rate of ``step``, from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step, decay_steps) / decay_steps))
        return base_lr * ((1 - alpha) * cosine + alpha)


class PolynomialLR(LRScheduler):
    """``(initial - end) * (1 - step / steps) ** power + end``.

    Args:
        optimizer: the optimizer.
        steps: number of steps of the decay (``decay_batch`` is an older name).
        end_learning_rate: the final rate.
        power: the exponent.
        cycle: repeat the decay, with ``steps`` multiplied by the number of the cycle.
        last_step: the number of the last update; -1 before the first.
        verbose: no effect.
    """

    ranges = {"steps": _STEPS}

    def __init__(self, *args: Any, decay_batch: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options, **({} if decay_batch is None else {"steps": decay_batch}))

    def rate(
        self,
        base_lr: float,
        step: int,
        steps: Any = None,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
    ) -> float:
        """Return the learning rate of ``step``, from 0."""
        if cycle:
            step = max(step, 1)
            steps *= math.ceil(step / steps)
        left = 1 - min(step, steps) / steps
        return float((base_lr - end_learning_rate) * left**power + end_learning_rate)


class CosineAnnealingWarmRestarts(LRScheduler):
    """Repeated half cosines from the initial rate to ``eta_min``; number n takes ``T_0 * T_mult ** n`` steps.

    Args:
        optimizer: the optimizer.
        T_0: steps of the first half cosine.
        T_mult: growth of the number of steps.
        eta_min: the lowest rate.
        decay_rate: factor of the initial rate at each restart.
        restart_limit: number of restarts after which the rate stays at ``eta_min``; 0: no limit.
        last_step: the number of the last update; -1 before the first.
        verbose: no effect.
    """

    ranges = {"T_0": _WHOLE, "T_mult": _WHOLE}

    def rate(  # type: ignore[override]
        self,
        base_lr: float,
        step: int,
        T_0: int,  # noqa: N803
        T_mult: int = 1,  # noqa: N803
        eta_min: float = 0.0,
        decay_rate: float = 1.0,
        restart_limit: int = 0,
    ) -> float:
        """Return the learning rate of ``step``, from 0."""
        restarts, steps = 0, T_0
        if T_mult == 1:
            restarts, step = divmod(step, steps)
        while step >= steps:
            restarts, step, steps = restarts + 1, step - steps, steps * T_mult
        if 0 < restart_limit <= restarts:
            return eta_min
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return eta_min + (base_lr * decay_rate**restarts - eta_min) * cosine


class SequentialLR(LRScheduler):
    """Schedulers in sequence: at each milestone the next one takes over.

    Args:
        optimizer: the optimizer of all schedulers.
        schedulers: one more than milestones.
        milestones: numbers of updates, ascending.
        interval_rescaling: whether a scheduler counts from its milestone, one bool for each milestone or for all.
            Otherwise it counts from the start of training. (Torch's always counts from the milestone.)
        last_step: the number of the last update; -1 before the first.
        verbose: no effect.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[_Plain],
        milestones: Sequence[int],
        interval_rescaling: Sequence[bool] | bool = False,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        each = isinstance(interval_rescaling, Sequence)
        rescaling: list[Any] = list(interval_rescaling) if each else [interval_rescaling] * len(milestones)  # type: ignore[arg-type]
        _check(
            len(schedulers) == len(milestones) + 1 == len(rescaling) + 1,
            f"SequentialLR() with {len(schedulers)} schedulers, {len(milestones)} milestones and {len(rescaling)} "
            "interval_rescaling: give one scheduler more than milestones, and one bool for each milestone",
        )
        _check_parts("SequentialLR()", schedulers, optimizer)
        self._schedulers, self.milestones = list(schedulers), list(milestones)
        self.interval_rescaling = rescaling
        super().__init__(optimizer, last_step, verbose)

    def rates(self, base_lrs: Sequence[Any], step: int) -> list[Any]:
        """Return the learning rate of each group for update number ``step``, from 0."""
        place = bisect.bisect_right(self.milestones, step)
        if place > 0 and self.interval_rescaling[place - 1]:
            step -= self.milestones[place - 1]
        return rates_at(self._schedulers[place], base_lrs, step)

    # They have the states of the inner schedulers.
    state_dict = torch.optim.lr_scheduler.SequentialLR.state_dict
    load_state_dict = torch.optim.lr_scheduler.SequentialLR.load_state_dict


class ChainedScheduler(SequentialLR):
    """Schedulers composed: the rate of each is the initial rate of the next."""

    def __init__(self, schedulers: Sequence[_Plain]) -> None:
        _check(bool(schedulers), "ChainedScheduler([]): give schedulers")
        optimizer = schedulers[0].optimizer
        _check_parts("ChainedScheduler()", schedulers, optimizer)
        self._schedulers, self.milestones, self.interval_rescaling = list(schedulers), [], []
        LRScheduler.__init__(self, optimizer)

    def rates(self, base_lrs: Sequence[Any], step: int) -> list[Any]:
        """Return the learning rate of each group."""
        rates = list(base_lrs)
        for scheduler in self._schedulers:
            rates = rates_at(scheduler, rates, step)
        return rates


class WarmupLR(SequentialLR):
    """A linear or constant warm-up, then another scheduler, or the initial rate.

    A linear warm-up rises from ``warmup_factor`` times the initial rate to the scheduler's rate at ``warmup_iters``.

    Args:
        scheduler_or_optimizer: the scheduler after the warm-up, or an optimizer: then its initial rate follows.
        warmup_factor: initial factor of the rate.
        warmup_iters: number of updates of the warm-up.
        warmup_method: ``"linear"`` or ``"constant"``.
        warmup_prefix: the scheduler counts from the end of the warm-up, which rises to the initial rate.
        last_step: the number of the last update; -1 before the first.
        verbose: no effect.
    """

    def __init__(
        self,
        scheduler_or_optimizer: _Plain | torch.optim.Optimizer,
        warmup_factor: float = 1.0 / 3,
        warmup_iters: int = 5,
        warmup_method: str = "linear",
        warmup_prefix: bool = False,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        _check(
            warmup_method in ("linear", "constant"),
            f"WarmupLR(warmup_method={warmup_method!r}): choose 'linear' or 'constant'",
        )
        after = None if isinstance(scheduler_or_optimizer, torch.optim.Optimizer) else scheduler_or_optimizer
        optimizer: Any = scheduler_or_optimizer if after is None else after.optimizer
        _check(
            isinstance(optimizer, torch.optim.Optimizer),
            f"WarmupLR({scheduler_or_optimizer!r:.60}): give a scheduler or an optimizer",
        )
        _check(after is not None or warmup_iters > 0, "WarmupLR(optimizer, warmup_iters=0) does nothing: leave it out")
        self.warmup_factor, self.warmup_iters = warmup_factor, warmup_iters
        self.warmup_method, self.warmup_prefix = warmup_method, warmup_prefix
        schedulers: list[_Plain] = [] if after is None else [after]
        if warmup_iters > 0:
            schedulers.insert(0, self._warmup(optimizer, after, last_step))
        milestones = [warmup_iters] * (len(schedulers) - 1)
        super().__init__(optimizer, schedulers, milestones, warmup_prefix, last_step, verbose)

    def _warmup(self, optimizer: torch.optim.Optimizer, after: _Plain | None, last_step: int) -> _Plain:
        if self.warmup_method == "constant":
            return ConstantLR(optimizer, self.warmup_factor, self.warmup_iters, last_step)
        end = 1.0
        if after is not None and not self.warmup_prefix:
            _check_closed(after)
            base_lrs = [float(lr) for lr in after.base_lrs]
            _check(
                all(math.isclose(lr, base_lrs[0], rel_tol=1e-5, abs_tol=1e-8) for lr in base_lrs),
                f"WarmupLR(): the groups start with the rates {base_lrs}; a linear warm-up needs them equal, or "
                "warmup_prefix=True: else use several optimizers",
            )
            end = float(rates_at(after, base_lrs, self.warmup_iters)[0]) / base_lrs[0]
        return LinearLR(optimizer, self.warmup_factor, end, self.warmup_iters, last_step)


WarmUpLR = WarmupLR


def rates_at(scheduler: _Plain, base_lrs: Sequence[Any], step: int) -> list[Any]:
    """Return a scheduler's rates of update ``step``, from 0, for groups whose initial rates are ``base_lrs``.

    Raises:
        ConfigError: the scheduler's rates depend on more than the number of the update.
    """
    if isinstance(scheduler, ClosedSchedule):
        return scheduler.rates(base_lrs, step)
    _check_closed(scheduler)
    before = scheduler.base_lrs, scheduler.last_epoch
    scheduler.base_lrs, scheduler.last_epoch = list(base_lrs), step
    try:
        return _torch.closed_form_rates(scheduler)
    finally:
        scheduler.base_lrs, scheduler.last_epoch = before


def _check_parts(call: str, schedulers: Sequence[_Plain], optimizer: torch.optim.Optimizer) -> None:
    for scheduler in schedulers:
        kind = type(scheduler).__name__
        _check(scheduler.optimizer is optimizer, f"{call}: {kind} belongs to another optimizer")
        _check_closed(scheduler)


def _check_closed(scheduler: _Plain) -> None:
    _check(
        isinstance(scheduler, ClosedSchedule) or _torch.has_closed_form_rates(scheduler),
        f"{type(scheduler).__name__} cannot be part of another scheduler: its rates depend on more than the number of "
        "the update",
    )


def _check(good: bool, problem: str) -> None:
    if not good:
        raise ConfigError(problem)


def _note_verbose(verbose: bool) -> None:
    if verbose:
        call_without_effect("verbose=True of a scheduler", "print scheduler.get_last_lr() for the rates")


def _of_torch(kind: Any) -> Any:
    """Return a subclass of torch's scheduler that takes OneFlow's ``last_step`` and ``verbose``."""

    def construct(self: Any, *args: Any, last_step: int = -1, verbose: bool = False, **options: Any) -> None:
        _note_verbose(verbose)
        kind.__init__(self, *args, **({} if last_step == -1 else {"last_epoch": last_step}), **options)

    members = {
        "__init__": construct,
        "__doc__": f"Torch's ``{kind.__name__}``, with ``last_step`` and ``verbose``.",
        "__module__": __name__,
        "last_step": property(lambda self: self.last_epoch),
    }
    return type(kind.__name__, (kind,), members)


CosineAnnealingLR: Any = _of_torch(torch.optim.lr_scheduler.CosineAnnealingLR)
ExponentialLR: Any = _of_torch(torch.optim.lr_scheduler.ExponentialLR)
LambdaLR: Any = _of_torch(torch.optim.lr_scheduler.LambdaLR)
MultiStepLR: Any = _of_torch(torch.optim.lr_scheduler.MultiStepLR)
MultiplicativeLR: Any = _of_torch(torch.optim.lr_scheduler.MultiplicativeLR)
StepLR: Any = _of_torch(torch.optim.lr_scheduler.StepLR)

__getattr__ = names_of(torch.optim.lr_scheduler)
