"""A step that depends on values of many kinds, and changes of each, for the cache of steps."""

from __future__ import annotations

import builtins
import collections
import contextlib
import enum
import functools
import math
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zerograph as zg
from zerograph.passes.context import Context

SCALE, LIMITS, STEPS = 2.0, {"low": {"value": 0.5}}, [1.0, 2.0]
ARRAY, QUEUE = np.array([1.0, 2.0]), collections.deque([1.0, 2.0])
LIBRARY = types.ModuleType("library_of_a_step")
LIBRARY.__dict__.update(FACTOR=1.5, __file__=__file__, __version__="1.0")
sys.modules[LIBRARY.__name__] = LIBRARY


@dataclass
class Options:
    power: float = 2.0


class Slots:
    __slots__ = ("__private", "shift")

    def __init__(self) -> None:
        self.shift, self.__private = 0.25, 1.0

    def gain(self) -> float:
        return self.__private


class Meta(type):
    GAIN = 1.0


class Measured(metaclass=Meta):
    pass


class Number(float):
    gain = 1.0


class Kind(enum.Enum):
    ONE = 1


OPTIONS, SLOTS, LOCAL, NUMBER, CONTEXT = Options(), Slots(), threading.local(), Number(1), contextlib.nullcontext(1.0)
LOCAL.gain, Kind.ONE.gain = 1.0, 1.0  # type: ignore[attr-defined]
MADE_GAIN = 1.0
MADE: dict[str, Any] = {"__name__": __name__}


def made(text: str) -> Any:
    """Return the function ``made`` that a string defines."""
    exec(text, globals(), MADE)
    return MADE["made"]


MADE_BY_NAME = made("def made(x): return x * MADE_GAIN")


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by * SCALE


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


@functools.cache
def cached_factor() -> float:
    return 0.5


scaled.gain, QUEUE_LIMIT = 1.0, collections.deque([0.0], maxlen=2)  # type: ignore[attr-defined]
TABLE, STRIDED = collections.OrderedDict(a=1.0), torch.ones(9)[::2]
TABLE.gain = 1.0  # type: ignore[attr-defined]
builtins.GAIN_OF_A_STEP = 1.0  # type: ignore[attr-defined]
PARTIAL, CLOSURE = functools.partial(scaled, by=0.5), times(3.0)


def multiplied(factor: float) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        return x * factor

    return multiply


LIFT, MULTIPLIED = 0.5, multiplied(2.0)


def lift(x: Tensor) -> Tensor:
    return MULTIPLIED(x) * 1.1875 + LIFT


lifted = torch.library.triton_op("zerograph_changes::lifted", lift, mutates_args=())
lifted.register_autograd(lambda ctx, gradient: gradient * 2.0 * LIFT)


@torch.compile(fullgraph=True, dynamic=True)
def compiled(x: Tensor) -> Tensor:
    return x * 1.0625


def by_name(name: str) -> Any:
    return getattr(sys.modules[__name__], name)


class Base(nn.Module):
    FACTOR = 0.5

    class Inner:
        GAIN = 1.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.gain, self.act = nn.Linear(4, 4), 1.0, times(0.5)
        self.register_buffer("offset", torch.zeros(width))
        self._sizes = [1.0, 2.0]
        self.gates = nn.ModuleList([nn.Threshold(0.0, 0.0), nn.Threshold(0.25, 0.0)])
        self._gate = [self.gates[0]]

    def forward(self, x: Tensor) -> Tensor:
        import library_of_a_step as library

        x = F.gelu(self.linear(x)) * 1.25 + self.offset.sum()
        x = self.act(CLOSURE(PARTIAL(scaled(x)))) * self.gain * self._sizes[-1] * self.FACTOR
        x = x.pow(OPTIONS.power) + LIMITS["low"]["value"] + SLOTS.shift + float(ARRAY[0]) + QUEUE[0] + STEPS[0]
        x = torch.relu(x) + float(os.environ.get("STEP_SHIFT", "1")) + library.FACTOR + cached_factor()
        with CONTEXT as gain:
            x = MADE_BY_NAME(x) * Measured.GAIN * NUMBER.gain * Kind.ONE.gain * LOCAL.gain * gain  # type: ignore[attr-defined]
        x = x * scaled.gain * QUEUE_LIMIT.maxlen * STRIDED.stride(0) * TABLE.gain * SLOTS.gain()  # type: ignore[attr-defined]
        try:
            x = x * A_NAME_OF_NOTHING  # type: ignore[name-defined]
        except NameError:
            x = x * self.Inner.GAIN
        x = x * GAIN_OF_A_STEP  # type: ignore[name-defined]  # noqa: F821
        x = self._gate[0](torch.ops.zerograph_changes.lifted(compiled(x)))
        return self.finished(x + round(1.75)) * getattr(self.linear.weight, "gain", 1.0)

    def finished(self, x: Tensor) -> Tensor:
        return x


class Body(Base):
    """Inherits everything."""


class Optimizer(torch.optim.SGD):
    """One that a user wrote."""

    RATE = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.01 * self.RATE)


def unchanged(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Return the graph."""
    return module


class Step(zg.ZeroGraph):
    def __init__(
        self,
        width: int = 3,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.extra, self._hidden = Body(width), (1.0, (2.0,)), 0.125
        self.add_optimizer(make(self.body.parameters(), **options))
        self.config.zero.stage = 2

    def build(self, x: Tensor) -> Tensor:
        loss = self.body(x).mean() * self.extra[1][0] + self._hidden
        loss.backward()
        return loss


Patch, Change = pytest.MonkeyPatch, Callable[[pytest.MonkeyPatch, float], Step]


def constants(function: Any, old: float, new: float) -> types.CodeType:
    """Return a function's code with another constant."""
    consts = tuple(new if constant == old else constant for constant in function.__code__.co_consts)
    code: types.CodeType = function.__code__.replace(co_consts=consts)
    return code


def on(make: Callable[[Patch, float], object]) -> Change:
    """Return a change before the step is made."""

    def change(patch: Patch, number: float) -> Step:
        make(patch, number)
        return Step()

    return change


def of(make: Callable[[Step, float], object]) -> Change:
    """Return a change of the step that was made."""

    def change(patch: Patch, number: float) -> Step:
        step = Step()
        make(step, number)
        return step

    return change


def tensor_method(patch: Patch, number: float) -> None:
    original = Tensor.mean
    patch.setattr(Tensor, "mean", lambda x, *args: original(x, *args) * number)


def library_version(patch: Patch, number: float) -> None:
    patch.setattr(LIBRARY, "__version__", str(number))


def hooked(step: Step, number: float) -> None:
    step.body.linear.register_forward_hook(lambda module, args, result: result * number)


def passes(step: Step, number: float) -> None:
    shift = int(number * 8) % 4

    def inserted(module: fx.GraphModule, context: Context) -> fx.GraphModule:
        """Return the graph."""
        return module if shift < 4 else unchanged(module, context)

    step.config.passes = (zg.PassEdit.before("place", inserted),)


def class_with_method(patch: Patch, number: float) -> None:
    patch.setattr(Body, "finished", lambda self, x: x * number, raising=False)


def optimizers_constant(patch: Patch, number: float) -> Step:
    patch.setattr(Optimizer, "RATE", number)
    return Step(make=Optimizer, lr=0.1)


CHANGES: dict[str, Change] = {
    "nothing": lambda patch, number: Step(),
    "a constant in forward": on(
        lambda patch, number: patch.setattr(Base.forward, "__code__", constants(Base.forward, 1.25, number))
    ),
    "a default argument": on(lambda patch, number: patch.setattr(scaled, "__defaults__", (number,))),
    "a function of the user": on(lambda p, n: p.setitem(globals(), "scaled", lambda x: x * n)),
    "a function that is compiled": on(
        lambda patch, number: patch.setattr(
            compiled.__wrapped__, "__code__", constants(compiled.__wrapped__, 1.0625, number)
        )
    ),
    "the function of an operator": on(lambda p, n: p.setattr(lift, "__code__", constants(lift, 1.1875, n))),
    "a global of an operator": on(lambda p, n: p.setitem(globals(), "LIFT", n)),
    "a closure of an operator": on(lambda p, n: p.setitem(globals(), "MULTIPLIED", multiplied(n))),
    "the backward of an operator": on(lambda p, n: p.setattr(lifted, "_backward_fn", lambda _, x: x * n)),
    "a function of torch.nn.functional": on(lambda p, n: p.setattr(F, "gelu", lambda x: x * n)),
    "a function of torch": on(lambda p, n: p.setattr(torch, "relu", lambda x: x * n)),
    "another function of torch": on(lambda p, n: p.setattr(torch, "relu", torch.tanh)),
    "a method of tensors": on(tensor_method),
    "a builtin function": on(lambda p, n: p.setattr(builtins, "round", lambda x: n)),
    "a builtin function in C": on(lambda p, n: p.setattr(builtins, "round", math.floor)),
    "a value among the builtins": on(lambda p, n: p.setattr(builtins, "GAIN_OF_A_STEP", n)),
    "an attribute of a function": on(lambda p, n: p.setattr(scaled, "gain", n)),
    "an attribute of a dict": on(lambda p, n: p.setattr(TABLE, "gain", n)),
    "the limit of a deque": on(
        lambda p, n: p.setitem(globals(), "QUEUE_LIMIT", collections.deque([0.0], maxlen=int(n * 8) + 3))
    ),
    "the strides of a tensor": on(lambda p, n: p.setitem(globals(), "STRIDED", torch.ones(15)[::3])),
    "a private slot": on(lambda p, n: p.setattr(SLOTS, "_Slots__private", n)),
    "a global number": on(lambda p, n: p.setitem(globals(), "SCALE", n)),
    "a global dict": on(lambda p, n: p.setitem(LIMITS["low"], "value", n)),
    "a global list": on(lambda p, n: p.setitem(globals(), "STEPS", [n, 2.0])),
    "an array of numpy": on(lambda p, n: p.setitem(globals(), "ARRAY", np.array([n, 2.0]))),
    "a deque": on(lambda p, n: p.setitem(globals(), "QUEUE", collections.deque([n, 2.0]))),
    "an object's attribute": on(lambda p, n: p.setattr(OPTIONS, "power", n)),
    "a thread's value": on(lambda p, n: p.setattr(LOCAL, "gain", n)),
    "a constant of a metaclass": on(lambda p, n: p.setattr(Meta, "GAIN", n)),
    "an attribute of a number": on(lambda p, n: p.setattr(NUMBER, "gain", n, raising=False)),
    "an attribute of a member": on(lambda p, n: p.setattr(Kind.ONE, "gain", n)),
    "a context's value": on(lambda p, n: p.setitem(globals(), "CONTEXT", contextlib.nullcontext(n))),
    "a global of a function made from text": on(lambda p, n: p.setitem(globals(), "MADE_GAIN", n)),
    "a method made from text": on(lambda p, n: p.setattr(Body, "finished", made(f"def made(self, x): return x * {n}"))),
    "a slot": on(lambda p, n: p.setattr(SLOTS, "shift", n)),
    "a closure": on(lambda p, n: p.setitem(globals(), "CLOSURE", times(n))),
    "a partial function": on(lambda p, n: p.setitem(globals(), "PARTIAL", functools.partial(scaled, by=n))),
    "a cached function": on(lambda p, n: p.setitem(globals(), "cached_factor", functools.cache(lambda: n))),
    "a module that forward imports": on(lambda p, n: p.setattr(LIBRARY, "FACTOR", n)),
    "the version of a dependency": on(library_version),
    "a variable that forward reads": on(lambda p, n: p.setenv("STEP_SHIFT", str(n))),
    "a variable that torch reads": on(lambda p, n: p.setenv("TORCH_SHOW_CPP_STACKTRACES", str(n))),
    "a constant of a class": on(lambda p, n: p.setattr(Base, "FACTOR", n)),
    "a constant of a class in a class": on(lambda p, n: p.setattr(Base.Inner, "GAIN", n)),
    "a name that stood for nothing": on(lambda p, n: p.setitem(globals(), "A_NAME_OF_NOTHING", n)),
    "a method of a subclass": on(class_with_method),
    "a setting of torch": on(lambda p, n: p.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)),
    "the default dtype": on(lambda p, n: p.setattr(torch, "get_default_dtype", lambda: torch.float64)),
    "the shape of a buffer": lambda patch, number: Step(width=4 + int(number * 16)),
    "a module's number": of(lambda step, n: setattr(step.body, "gain", n)),
    "a module's function": of(lambda step, n: setattr(step.body, "act", times(n))),
    "a module's private list": of(lambda step, n: step.body._sizes.append(n)),
    "one of two modules of a class": of(lambda step, n: setattr(step.body, "_gate", [step.body.gates[1]])),
    "a hook": of(hooked),
    "an attribute of a parameter": of(lambda step, n: setattr(step.body.linear.weight, "gain", n)),
    "a tuple of the graph": of(lambda step, n: setattr(step, "extra", (1.0, (n,)))),
    "a private number of the graph": of(lambda step, n: setattr(step, "_hidden", n)),
    "an option": of(lambda step, n: setattr(step.config, "clip_grad_norm", n)),
    "a pass": of(passes),
    "a parameter without gradient": of(lambda step, n: step.body.linear.bias.requires_grad_(False)),
    "the optimizer's class": lambda patch, number: Step(make=torch.optim.Adam),
    "a hyperparameter": lambda patch, number: Step(weight_decay=number),
    "the user's optimizer": lambda patch, number: Step(make=Optimizer, lr=0.1),
    "a constant of the user's optimizer": optimizers_constant,
}
