"""Python state that build() changes, and random numbers of Python and numpy: as in plain PyTorch, or told."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import Step, compilations_of, inputs, model
from tests.models import update_by
from zerograph.capture.places import PythonState, walk
from zerograph.ir.mesh import line

needs_lines = pytest.mark.skipif(
    sys.gettrace() is not None, reason="a debugger or coverage traces lines, so a step cannot, and names none"
)

COUNTS: dict[str, Any] = {"calls": 0}
CALLS = 0
COLLECTED: list[Any] = []
CACHE: dict[str, float] = {}
KEPT = types.SimpleNamespace(calls=0, loss=None)
GENERATOR = np.random.default_rng(0)


@dataclasses.dataclass
class State:
    calls: int = 0


class Slots:
    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def count(self) -> int:
        self.__calls += 1
        return self.__calls


def warm_up(calls: int, loss: Tensor) -> Tensor:
    return loss * 0.1 if calls < 2 else loss


def in_a_dict(made: Any, loss: Tensor) -> Tensor:
    made.counts["calls"] += 1
    return warm_up(made.counts["calls"], loss)


def in_a_nested_list(made: Any, loss: Tensor) -> Tensor:
    made.nested["a"][0][1] += 1
    return warm_up(made.nested["a"][0][1], loss)


def in_an_object(made: Any, loss: Tensor) -> Tensor:
    made.state.calls += 1
    return warm_up(made.state.calls, loss)


def in_a_private_slot(made: Any, loss: Tensor) -> Tensor:
    return warm_up(made.slots.count(), loss)


def in_a_namespace(made: Any, loss: Tensor) -> Tensor:
    made.namespace.calls += 1
    return warm_up(made.namespace.calls, loss)


def in_a_global_dict(made: Any, loss: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return warm_up(COUNTS["calls"], loss)


def in_a_dict_beside_a_tensor(made: Any, loss: Tensor) -> Tensor:
    COUNTS["loss"] = loss.detach()
    return in_a_global_dict(made, loss)


def in_an_object_beside_a_tensor(made: Any, loss: Tensor) -> Tensor:
    KEPT.calls, KEPT.loss = KEPT.calls + 1, loss.detach()
    return warm_up(KEPT.calls, loss)


def in_a_global(made: Any, loss: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return warm_up(CALLS, loss)


def counted() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def in_a_closure(made: Any, loss: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return warm_up(calls, loss)

    return in_a_closure


def in_a_default(made: Any, loss: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return warm_up(calls[0], loss)


def in_the_function(made: Any, loss: Tensor) -> Tensor:
    in_the_function.calls += 1  # type: ignore[attr-defined]
    return warm_up(in_the_function.calls, loss)  # type: ignore[attr-defined]


def by_the_length_of_a_list(made: Any, loss: Tensor) -> Tensor:
    made.seen.append("call")
    return warm_up(len(made.seen), loss)


COUNTERS = {
    "a dict": (lambda: in_a_dict, r"model\.counts\['calls'\]", 'made.counts["calls"] += 1'),
    "a nested list": (lambda: in_a_nested_list, r"model\.nested\['a'\]\[0\]\[1\]", "+= 1"),
    "an object": (lambda: in_an_object, r"model\.state\.calls", "made.state.calls += 1"),
    "a private slot": (lambda: in_a_private_slot, r"model\.slots\._Slots__calls", "self.__calls += 1"),
    "a namespace": (lambda: in_a_namespace, r"model\.namespace\.calls", "made.namespace.calls += 1"),
    "a global dict": (lambda: in_a_global_dict, r"COUNTS\['calls'\]", 'COUNTS["calls"] += 1'),
    "a dict beside a tensor": (lambda: in_a_dict_beside_a_tensor, r"COUNTS\['calls'\]", 'COUNTS["calls"] += 1'),
    "an object beside a tensor": (lambda: in_an_object_beside_a_tensor, r"KEPT\.calls", "KEPT.calls + 1"),
    "a global": (lambda: in_a_global, "CALLS", "CALLS += 1"),
    "a closure": (counted, "calls", "calls += 1"),
    "a default": (lambda: in_a_default, r"in_a_default\.__defaults__\[0\]\[0\]", "calls[0] += 1"),
    "the function": (lambda: in_the_function, r"in_the_function\.calls", "in_the_function.calls += 1"),
}


def with_state() -> nn.Module:
    made: Any = model()
    made.counts, made.nested, made.state = {"calls": 0}, {"a": [(0, 1), [2, 0]][1:]}, State()
    made.nested["a"] = [[2, 0]]
    made.namespace, made.seen, made.slots = types.SimpleNamespace(calls=0), [], Slots()
    return made


@pytest.fixture(autouse=True)
def _from_the_beginning() -> None:
    global CALLS
    COUNTS.clear()
    COUNTS["calls"] = KEPT.calls = CALLS = 0
    KEPT.loss = None
    COLLECTED.clear()
    CACHE.clear()
    in_a_default.__defaults__[0][0] = 0  # type: ignore[index]
    in_the_function.calls = 0  # type: ignore[attr-defined]


def losses_of(act: Callable[[Any, Tensor], Tensor], steps: int) -> tuple[list[float], Any]:
    made = with_state()
    step = Step(made, lambda made, x: act(made, made(x).square().mean()))
    return [step(*inputs([4])).item() for _ in range(steps)], step


def plain_losses_of(act: Callable[[Any, Tensor], Tensor], steps: int) -> list[float]:
    made = with_state()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    return [update_by(optimizer, act(made, made(*inputs([4])).square().mean())).item() for _ in range(steps)]


def together(makes: Iterable[Callable[[], Any]]) -> Callable[[Any, Tensor], Tensor]:
    """Return what counts in several places, one after another."""
    acts = [make() for make in makes]
    return lambda made, loss: functools.reduce(lambda loss, act: act(made, loss), acts, loss)


# In one step all that have a place of their own.
@needs_lines
@pytest.mark.parametrize("beside_tensors", [False, True])
def test_counters_of_calls_count_as_in_plain_pytorch_with_a_warning(beside_tensors: bool) -> None:
    makes, names, codes = zip(
        *(row for key, row in COUNTERS.items() if ("tensor" in key) == beside_tensors), strict=True
    )
    expected = plain_losses_of(together(makes), 4)
    _from_the_beginning.__wrapped__()  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"build\(\) changes Python state") as told:
        losses, _ = losses_of(together(makes), 4)
    assert losses == pytest.approx(expected, rel=1e-12)
    (text,) = (str(one.message) for one in told if "build() changes Python state that differs" in str(one.message))
    for name, code in zip(names, codes, strict=True):
        assert re.search(rf"(: |, ){name}[,\n]", text), (name, text)
        assert code in text


def test_a_list_whose_length_decides_is_followed() -> None:
    expected = plain_losses_of(by_the_length_of_a_list, 4)
    with pytest.warns(UserWarning, match=r"changes Python state .*model.seen"):
        losses, _ = losses_of(by_the_length_of_a_list, 4)
    assert losses == pytest.approx(expected, rel=1e-12)


@needs_lines
def test_what_is_only_collected_is_said_to_be_lost() -> None:
    def collect(made: Any, loss: Tensor) -> Tensor:
        made.seen.append("call")
        return loss

    with pytest.warns(UserWarning, match=r"build.. adds to model.seen\n.*made.seen.append.\"call\"."):
        _, step = losses_of(collect, 3)
    assert step.model.seen == ["call"]
    assert compilations_of(step) == 1


def cached(made: Any, loss: Tensor) -> Tensor:
    if "scale" not in made.counts:
        made.counts["scale"] = 3.0
    if "scale" not in CACHE:
        CACHE["scale"] = 2.0
    made.namespace.ready = True
    return loss * CACHE["scale"] * made.counts["scale"]


def test_a_cache_is_neither_warned_of_nor_compiled_for_again() -> None:
    with warnings.catch_warnings(action="error", category=UserWarning):
        losses, step = losses_of(cached, 3)
    assert losses == pytest.approx(plain_losses_of(cached, 3), rel=1e-12)
    assert compilations_of(step) == 1


def first_otherwise(made: Any, loss: Tensor) -> Tensor:
    first, made.counts["begun"] = "begun" not in made.counts, True
    return loss * 5 if first else loss


def test_a_first_step_that_is_another_one_is_followed_by_one_more_compilation() -> None:
    losses, step = losses_of(first_otherwise, 4)
    assert losses == pytest.approx(plain_losses_of(first_otherwise, 4), rel=1e-12)
    assert compilations_of(step) == 2


def test_state_is_as_before_after_an_error() -> None:
    def fail(made: Any, loss: Tensor) -> Tensor:
        made.counts["calls"] += 1
        COUNTS["calls"] += 1
        COLLECTED.append(loss)
        random.random()
        return loss if loss > 0 else loss * 2

    before = random.getstate()
    with pytest.raises(zg.CaptureError, match="read a tensor's value"):
        losses_of(fail, 1)
    assert COUNTS == {"calls": 0}
    assert not COLLECTED
    assert random.getstate() == before


def test_tensors_kept_in_a_global_or_in_an_object_are_lost_with_a_warning() -> None:
    def collect(made: Any, loss: Tensor) -> Tensor:
        COLLECTED.append(loss.detach())
        KEPT.loss = loss.detach()
        return loss

    with pytest.warns(UserWarning, match="build.. stores tensors in (KEPT.loss, COLLECTED|COLLECTED, KEPT.loss):"):
        losses_of(collect, 2)
    assert not COLLECTED
    assert KEPT.loss is None


def carried() -> Callable[[Any, Tensor], Tensor]:
    average: Any = None

    def body(made: Any, loss: Tensor) -> Tensor:
        nonlocal average
        average = loss.detach() if average is None else 0.9 * average + 0.1 * loss.detach()
        return loss * average

    return body


def test_a_tensor_carried_in_a_closure_is_refused() -> None:
    with pytest.raises(zg.CaptureError, match=r"build.. reads a tensor .* the step before is to leave in average"):
        losses_of(carried(), 1)


def branch(made: Any, loss: Tensor) -> Tensor:
    return loss if random.random() < 0.999 else loss * 2


def numpy_scale(made: Any, loss: Tensor) -> Tensor:
    return loss * float(np.random.normal())


def own_generator(made: Any, loss: Tensor) -> Tensor:
    return loss * GENERATOR.random()


RANDOM = {
    branch: "random.random()",
    numpy_scale: "np.random.normal()",
    own_generator: "GENERATOR.random()",
}


@needs_lines
@pytest.mark.parametrize("act", RANDOM)
def test_a_step_that_depends_on_random_numbers_of_python_is_refused_with_the_line(act: Any) -> None:
    made = model()
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    with pytest.raises(zg.CaptureError, match=r"depends on random numbers .*\n  .*test_python_state.py:\d+ ") as error:
        Step(made, lambda made, x: act(made, made(x).square().mean())).prepare(line(2, 0, "ranks"), *inputs([4]))
    assert RANDOM[act] in str(error.value)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]


@needs_lines
def test_a_random_number_for_something_else_is_a_warning() -> None:
    def log(made: Any, loss: Tensor) -> Tensor:
        if random.random() < 0.5:
            str(loss.shape)
        return loss

    random.seed(0)
    with pytest.warns(UserWarning, match="build.. draws random numbers of Python or numpy\n.*random.random"):
        losses_of(log, 2)
    drawn = random.getstate()
    random.seed(0)
    random.random()
    assert random.getstate() == drawn


def test_dropout_and_layer_drop_of_torch_stay_as_they_are() -> None:
    def drop(made: Any, loss: Tensor) -> Tensor:
        return torch.nn.functional.dropout(loss, 0.5) + torch.where(torch.rand(()) < 0.5, loss, 0.0)

    with warnings.catch_warnings(action="error", category=UserWarning):
        losses_of(drop, 2)


def test_a_private_number_of_the_graph_counts() -> None:
    class Counting(Step):
        def build(self, x: Tensor) -> Tensor:
            self._calls = getattr(self, "_calls", 0) + 1
            loss = warm_up(self._calls, self.model(x).square().mean())
            loss.backward()
            return loss

    step = Counting(model(), lambda made, x: x)
    plain = copy.deepcopy(step.model)
    with pytest.warns(UserWarning, match=r"changes Python state .*: self\._calls\n"):
        losses = [step(*inputs([4])).item() for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, found in enumerate(losses):
        loss = update_by(optimizer, warm_up(number + 1, plain(*inputs([4])).square().mean()))
        assert found == pytest.approx(loss.item(), rel=1e-12)


def test_a_learning_rate_set_in_build_is_seen() -> None:
    def halve(made: Any, loss: Tensor) -> Tensor:
        for group in made.optimizers[0].param_groups:
            group["lr"] *= 0.5
        return loss

    made = with_state()
    step = Step(made, lambda made, x: halve(made, made(x).square().mean()))
    made.optimizers = tuple(step._optimizers)
    with pytest.warns(UserWarning, match=r"changes Python state .*param_groups\[0\]\['lr'\]"):
        step.prepare(line(2, 0, "ranks"), *inputs([4]))


def checked(made: Any, loss: Tensor) -> Tensor:
    assert loss.dim() == 0
    return loss


def test_an_assertion_that_pytest_rewrote_does_not_reach_pytest() -> None:
    """Its configuration holds logs and plugins: a capture would walk through them, and find that they change."""
    assert "@pytest_ar" in globals()
    names = [place.name for place, *_ in walk(PythonState(checked, nn.Module(), []).places())]
    assert not [name for name in names if "_config" in name]


class Activations(collections.OrderedDict[str, Any]):
    """Activations by name, as transformers keeps them: reading an entry makes a module of it."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Activations(relu=nn.ReLU, gelu=nn.GELU)


def test_a_dict_that_makes_what_it_returns_keeps_its_entries() -> None:
    def activated(made: Any, loss: Tensor) -> Tensor:
        CACHE["calls"] = 1.0
        return ACTIVATIONS["relu"](loss)  # type: ignore[no-any-return]

    losses, step = losses_of(activated, 3)
    assert losses == pytest.approx(plain_losses_of(activated, 3), rel=1e-12)
    assert compilations_of(step) == 1
    assert dict(ACTIVATIONS.items()) == {"relu": nn.ReLU, "gelu": nn.GELU}


class Trained(nn.Module):
    """A module of a framework that makes a position of data, and leaves it out of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.position_of_data = iter([1, 2])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "position_of_data": None}

    def forward(self, x: Tensor) -> Tensor:
        return x


class OfTrained(Trained):
    """A module that calls the method of its base."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_what_makes_or_copies_an_object_is_not_followed_by_its_methods() -> None:
    module = OfTrained()
    assert "position_of_data" not in PythonState(module.forward, module, []).texts
