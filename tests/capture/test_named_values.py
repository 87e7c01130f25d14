"""Values that the code reads by name and a script changes between calls: a step is compiled anew, or was before."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

import zerograph as zg
from tests.harness import LossStep, are_graphs, compilations_of, sliced
from tests.models import update_by
from tests.pool import Pool

FACTOR = 1.0
TABLE: dict[str, Any] = {"factor": 1.0, "deep": [1.0, {"last": 1.0}], "cached": 1.0, "tabled": 1.0, "partial": 1.0}
WEIGHT = torch.ones(1, dtype=torch.float64)
IN_CONTEXT: ContextVar[float] = ContextVar("factor")
DAY = datetime.date(2026, 1, 1)
LARGE = numpy.ones(5000)
HOOKS: list[RemovableHandle] = []


class Kinds(type):
    """A class of classes with a property."""

    level = 1.0

    @property
    def scale(cls) -> float:
        return Kinds.level


class Scale(metaclass=Kinds):
    """Such a class."""


class Options:
    of_class = 1.0

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.inner, self.other = factor, types.SimpleNamespace(factor=1.0), 0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor * self.inner.factor * self.of_class


class Schedule:
    """An object that is called, with others inside."""

    def __init__(self) -> None:
        self._factor, self._inner = 1.0, [types.SimpleNamespace(_last=1.0)]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._factor * self._inner[0]._last


class Others(Options):
    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x).relu()


class Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Criterion(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).square().mean()


def activation(x: Tensor) -> Tensor:
    return x


def counted() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    factor = 1.0

    def scaled(x: Tensor, *, more: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return x * factor * more[0]

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, change


@functools.cache
def of_table(name: str) -> Any:
    return TABLE[name]


def by_table(x: Tensor) -> Tensor:
    return x * TABLE["tabled"]


options, slots, criterion, referred = Options(), Slots(), Criterion(), Options()
FUNCTIONS, PARTIAL = {"by_table": by_table}, functools.partial(lambda x, y: x * y * TABLE["partial"], 1.0)
scaled, change_closure = counted()
# A layer that no module has.
LAYERS = [nn.LeakyReLU(0.5)]
# A name that the model has for something else.
loss: Any = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.options, self.table = Options(), {"factor": 1.0}
        self.loss, self.schedule, self.called = 1.0, Schedule(), Schedule().__call__
        self.ordered, self.reference = OrderedDict(first=1.0, second=2.0), weakref.ref(referred)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            self.called(self.schedule(LAYERS[0](x)))
            * IN_CONTEXT.get()
            * DAY.day
            * LARGE[0]
            * next(iter(self.ordered.values()))
        )
        x = torch.tanh(self.linear(x)) * FACTOR * TABLE["factor"] * TABLE["deep"][1]["last"] * WEIGHT * self.loss
        x = scaled(activation(x).sigmoid()) * slots.factor * self.table["factor"] * Scale.scale
        x = x * float(os.environ.get("FACTOR_OF_A_STEP", "1")) * math.sqrt(2.0)
        x = PARTIAL(FUNCTIONS["by_table"](x)) * of_table("cached") * self.reference().factor  # type: ignore[union-attr]
        return options.scaled(self.options.scaled(x))


EDITS: dict[str, Callable[[Model], object]] = {
    "a hook of all modules": lambda _: HOOKS.append(register_module_forward_hook(scaled_if_linear)),
    "a global": lambda _: globals().update(FACTOR=2.0),
    "an entry of a dict": lambda _: TABLE.update(factor=0.5),
    "a dict in a list in a dict": lambda _: TABLE["deep"][1].update(last=3.0),
    "a dict in place of another": lambda _: globals().update(
        TABLE={**TABLE, "factor": 0.25, "deep": [0.0, {"last": 2.0}]}
    ),
    "a global tensor": lambda _: globals().update(WEIGHT=torch.full((1,), 2.0, dtype=torch.float64)),
    "a function": lambda _: globals().update(activation=torch.relu),
    "an attribute of an object": lambda _: setattr(options, "factor", 0.7),
    "an object in an object": lambda _: setattr(options.inner, "factor", 1.7),
    "an attribute of a class": lambda _: setattr(Options, "of_class", 1.1),
    "a slot": lambda _: setattr(slots, "factor", 0.9),
    "a variable of a closure": lambda _: change_closure(1.3),
    "a default": lambda _: scaled.__kwdefaults__["more"].__setitem__(0, 0.6),  # type: ignore[attr-defined]
    "a criterion that no graph has": lambda _: setattr(criterion, "factor", 1.9),
    "an option of the model": lambda model: setattr(model.options, "factor", 1.2),
    "an object in an option of the model": lambda model: setattr(model.options.inner, "factor", 0.8),
    "options in place of others": lambda model: setattr(model, "options", Options(0.3)),
    "options of another class": lambda model: setattr(model, "options", Others()),
    "an object that is called": lambda model: setattr(model.schedule, "_factor", 0.7),
    "an object in an object that is called": lambda model: setattr(model.schedule._inner[0], "_last", 0.7),
    "the object of a method": lambda model: setattr(model.called.__self__, "_factor", 0.7),  # type: ignore[attr-defined]
    "a method of a class": lambda _: setattr(Schedule, "__call__", lambda self, x: x * 0.8),
    "an attribute in place of a class's": lambda _: setattr(options, "of_class", 1.4),
    "a context": lambda _: IN_CONTEXT.set(0.6),
    "a date": lambda _: globals().update(DAY=datetime.date(2026, 1, 2)),
    "an array": lambda _: LARGE.__setitem__(0, 0.5),
    "the order of a dict": lambda model: model.ordered.move_to_end("first"),
    "a dict of the model": lambda model: model.table.update(factor=1.6),
    "an object of a weak reference": lambda _: setattr(referred, "factor", 0.4),
    "what a cached function reads": lambda _: (TABLE.update(cached=0.7), of_table.cache_clear()),
    "what a function in a dict reads": lambda _: TABLE.update(tabled=0.7),
    "what a partial function reads": lambda _: TABLE.update(partial=0.7),
    "an attribute of a layer in a list": lambda _: setattr(LAYERS[0], "negative_slope", 0.1),
    "a method of a tensor": lambda _: setattr(Tensor, "sigmoid", Tensor.tanh),
    "a function of torch": lambda _: setattr(torch, "tanh", torch.sigmoid),
    "a variable of the environment": lambda _: os.environ.update(FACTOR_OF_A_STEP="1.5"),
    "a property of a class of classes": lambda _: setattr(Kinds, "level", 2.0),
    "a function of Python": lambda _: setattr(math, "sqrt", math.exp),
    "a function of torch.nn": lambda _: setattr(nn.functional, "linear", lambda x, weight, *_: x @ weight),
    # Does not call that function.
    "a method of a layer": lambda _: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T),
}
# Edits that one step sees one after another.
TOGETHER = 5


def scaled_if_linear(layer: nn.Module, _: Any, result: Any) -> Any:
    return result * 1.1 if isinstance(layer, nn.Linear) else None


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return criterion(model(x))


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Undo at the end of the block what an edit has changed inside."""
    before, call, of_torch = dict(globals()), Schedule.__call__, (torch.tanh, nn.functional.linear, nn.Linear.forward)
    sqrt, sigmoid = math.sqrt, Tensor.sigmoid
    IN_CONTEXT.set(1.0)
    yield
    globals().update(before)
    torch.tanh, nn.functional.linear, nn.Linear.forward = of_torch
    Schedule.__call__, math.sqrt, Kinds.level = call, sqrt, 1.0  # type: ignore[method-assign]
    Tensor.sigmoid, LAYERS[0].negative_slope = sigmoid, 0.5  # type: ignore[method-assign]
    os.environ.pop("FACTOR_OF_A_STEP", None)
    while HOOKS:
        HOOKS.pop().remove()
    LARGE[0] = 1.0
    vars(options).pop("of_class", None)
    TABLE.update(factor=1.0, deep=[1.0, {"last": 1.0}], cached=1.0, tabled=1.0, partial=1.0)
    of_table.cache_clear()
    for holder in (options, slots, criterion, options.inner, referred):
        holder.factor = 1.0  # type: ignore[attr-defined]
    Options.of_class = 1.0
    change_closure(1.0)
    scaled.__kwdefaults__["more"][0] = 1.0  # type: ignore[attr-defined]


def losses_of(way: str, *edits: Callable[[Model], object]) -> tuple[list[float], list[int]]:
    """Train three steps, and three more after each edit; return losses, and the numbers of compilations after each.

    Args:
        way: "graph", "loop" or "plain".
        edits: each changes a value.
    """
    global loss
    torch.manual_seed(0)
    plain_model = model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = LossStep(model, optimizer, loss=loss_of) if way == "graph" else None
    if way == "loop":
        model, optimizer = zg.prepare(model, optimizer, stage=2)
    losses, compilations = [], []
    with as_before():
        for number in range(3 + 3 * len(edits)):
            if number and number % 3 == 0:
                edits[number // 3 - 1](plain_model)
            x = torch.arange(8, dtype=torch.float64).view(2, 4) - number % 3
            if step is not None:
                loss = step(x)
                compilations.append(compilations_of(step))
            else:
                loss = update_by(optimizer, criterion(model(x)))
            losses.append(loss.item())
    assert way != "loop" or all(are_graphs(model))
    return losses, compilations


@pytest.mark.parametrize("first", range(0, len(EDITS), TOGETHER))
def test_a_step_is_compiled_anew_where_a_value_that_it_reads_has_changed(first: int) -> None:
    names = list(EDITS)[first : first + TOGETHER]
    edits = [EDITS[name] for name in names]
    plain, _ = losses_of("plain", *edits)
    losses, compilations = losses_of("graph", *edits)
    # A global called as an attribute of the model has changed in each step.
    for number, name in enumerate(["none", *names]):
        steps = slice(3 * number, 3 * number + 3)
        assert compilations[steps] == [number + 1] * 3, name
        assert losses[steps] == pytest.approx(plain[steps], rel=1e-12), name
        assert not number or plain[steps] != pytest.approx(plain[3 * number - 3 : 3 * number], rel=1e-6), name


SOME = list(dict.fromkeys([*list(EDITS)[::4], *list(EDITS)[-5:]]))


@sliced("names", [SOME[first::5] for first in range(5)], [[name] for name in EDITS])
def test_calls_in_a_loop_follow_what_has_changed(names: list[str]) -> None:
    edits = [EDITS[name] for name in names]
    plain, _ = losses_of("plain", *edits)
    assert losses_of("loop", *edits)[0] == pytest.approx(plain, rel=1e-12)


def test_a_value_that_comes_back_finds_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    IN_CONTEXT.set(1.0)
    step, losses = LossStep(model := Model(), torch.optim.SGD(model.parameters(), lr=0.0), loss=loss_of), []
    for factor in (1.0, 2.0, 1.0, 2.0, float("1.0")):
        monkeypatch.setattr(options, "factor", factor)
        losses.append(step(torch.ones(2, 4, dtype=torch.float64)).item())
    assert compilations_of(step) == 2
    assert losses[1] == pytest.approx(4 * losses[0], rel=1e-12)
    assert losses == [losses[0], losses[1]] * 2 + [losses[0]]


def test_a_value_that_changes_in_every_step_is_named() -> None:
    step = LossStep(model := Model(), torch.optim.SGD(model.parameters(), lr=0.0), loss=loss_of)
    x = torch.ones(2, 4, dtype=torch.float64)
    with as_before():
        for number in range(7):
            options.factor = 1.0 + number
            step(x)
        options.factor = 0.0
        with pytest.warns(zg.ZeroGraphWarning, match=r"since the last time this has changed: options\.factor\n"):
            step(x)


def test_a_loop_whose_value_changes_in_every_step_runs_operator_by_operator() -> None:
    model = Model()
    prepared, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=2)
    x, ratios = torch.ones(2, 4, dtype=torch.float64), []
    with as_before(), warnings.catch_warnings(record=True, action="always") as caught:
        for number in range(12):
            options.factor = 1.0 + number
            loss = criterion(prepared(x))
            loss.backward()
            optimizer.step()
            ratios.append(loss.item() ** 0.5)
    assert ratios == pytest.approx([ratios[0] * (1 + number) for number in range(12)], rel=1e-12)
    assert sum("what they depend on changes in each call" in str(one.message) for one in caught) == 1


def on_one_rank() -> str:
    step = LossStep(model := Model(), torch.optim.SGD(model.parameters(), lr=0.0), loss=loss_of)
    x = torch.ones(2, 4, dtype=torch.float64)
    with as_before():
        globals().update(FACTOR=2.0)
        step(x)
        options.other = zg.rank()
        step(x)
        options.factor += zg.rank()
        try:
            step(x)
        except zg.RankMismatchError as error:
            return str(error)
    return ""


def test_a_change_on_one_rank_only_is_an_error_that_names_the_value(pool: Pool) -> None:
    for message in pool.run(2, on_one_rank):
        assert "options.factor" in message


class Called(zg.ZeroGraph):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def build(self, x: Tensor) -> Tensor:
        h = F.relu(x + self.linear.weight.square()) + F.dropout(x, 0.0)
        return F.softmax(h, 0) + h.norm() + h.abs() + F.embedding(x.long(), self.linear.weight).sum()


@pytest.mark.filterwarnings(r"ignore:build\(\) adds to calls")
@pytest.mark.parametrize(
    ("owner", "name"),
    [*((F, name) for name in ("relu", "dropout", "softmax", "embedding")), (Tensor, "norm"), (Tensor, "abs")],
)
def test_a_function_in_place_of_torchs_is_called_as_often_as_in_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    plain, calls, step, x = getattr(owner, name), [], Called(), torch.ones(3, 3)

    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(name)
        return 2 * plain(*args, **kwargs)

    expected = [step.build(x)]
    monkeypatch.setattr(owner, name, doubled, raising=False)
    expected.append(step.build(x))
    assert not torch.equal(*expected)
    calls.clear()
    torch.testing.assert_close(step(x), expected[1])
    assert calls == [name]


def test_a_function_of_a_library_named_like_torch_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x, module = Called(), torch.ones(3, 3), {"__name__": "torchvision.ops", "plain": F.relu}
    exec("def doubled(x, inplace=False): return 2 * plain(x)", module)
    monkeypatch.setattr(F, "relu", module["doubled"])
    torch.testing.assert_close(step(x), step.build(x))


@pytest.mark.parametrize(("owner", "name"), [(F, "relu"), (Tensor, "abs")])
def test_a_function_of_torch_that_the_code_has_kept_is_torchs(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    kept, x = getattr(owner, name), torch.ones(3)

    class Kept(zg.ZeroGraph):
        def build(self, x: Tensor) -> Tensor:
            return kept(x)

    monkeypatch.setattr(owner, name, lambda *args, **kwargs: 2 * kept(*args, **kwargs), raising=False)
    assert torch.equal(Kept()(x), x)


class Reading(nn.Module):
    """Reads a value that ``change`` replaces by one that equals it, or that is in a private attribute."""

    def __init__(self, read: Callable[[Any], Any], value: Any) -> None:
        super().__init__()
        self.linear, self.read, self.value, self._value = nn.Linear(4, 4).double(), read, value, value

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self)


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        (1, True, lambda net: 0.5 if net.value is True else 1.0),
        (1, 1.0, lambda net: 0.5 if type(net.value) is float else 1.0),
        ((1,), (1.0,), lambda net: 0.5 if type(net.value[0]) is float else 1.0),
        (0.0, -0.0, lambda net: math.copysign(1.0, net.value)),
        ([0.0], [-0.0], lambda net: math.copysign(1.0, net.value[0])),
        (torch.ones(()), torch.tensor(0.5), lambda net: net._value),
    ],
    ids=["True", "float", "float in a tuple", "-0.0", "-0.0 in a list", "a private tensor"],
)
def test_an_equal_value_of_another_kind_or_sign_and_a_private_tensor_count(before: Any, after: Any, read: Any) -> None:
    net = Reading(read, before)
    step = LossStep(net, torch.optim.SGD(net.parameters(), lr=0.0), loss=lambda net, x: net(x).sum())
    x = torch.ones(2, 4, dtype=torch.float64)
    for value in (before, after):
        net.value = net._value = value
        torch.testing.assert_close(step(x), net(x).sum().detach(), rtol=1e-12, atol=0)
