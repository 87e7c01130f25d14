"""The members of a graph are found once; whatever a captured graph depends on is seen all the same when it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import Predict, batch_on
from zerograph.base.dictionaries import Dictionaries
from zerograph.compiler.members import capture_facts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.factor, self._private, self.pair = 2.0, 1, (1, 2)
        self.table = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor * self.scale


def new_step() -> Predict:
    return Predict(nn.Sequential(Layer(), Layer()))


class Other(Layer):
    pass


def found(step: Predict) -> tuple[Any, ...]:
    members = step._members()
    facts = capture_facts(members, step._attributes(), (), lambda *_: {})
    return list(members.parameters), list(map(id, members.parameters.values())), facts


CHANGES: dict[str, Callable[[Layer, Predict], object]] = {
    "a number": lambda layer, _: setattr(layer, "factor", 3.0),
    "a private number": lambda layer, _: setattr(layer, "_private", 2),
    "a tuple": lambda layer, _: setattr(layer, "pair", (1, 3)),
    "a plain tensor": lambda layer, _: setattr(layer, "table", torch.ones(3)),
    "another attribute": lambda layer, _: setattr(layer, "more", 1),
    "an attribute less": lambda layer, _: delattr(layer, "pair"),
    "the mode": lambda layer, _: layer.eval(),
    "a parameter": lambda layer, _: setattr(layer.linear, "weight", nn.Parameter(torch.ones(3, 3))),
    "no bias": lambda layer, _: setattr(layer.linear, "bias", None),
    "requires_grad": lambda layer, _: layer.linear.weight.requires_grad_(False),
    "a parameter's dtype": lambda layer, _: layer.linear.double(),
    "a parameter's shape": lambda layer, _: setattr(layer.linear.weight, "data", torch.ones(4, 3)),
    "a buffer's shape": lambda layer, _: setattr(layer, "scale", torch.ones(1)),
    "another module": lambda layer, _: setattr(layer, "linear", nn.Linear(3, 3, bias=False)),
    "a module more": lambda layer, _: layer.add_module("more", nn.ReLU()),
    "a class": lambda layer, _: setattr(layer, "__class__", Other),
    "a hook": lambda layer, _: layer.register_forward_hook(lambda *_: None),
    "a hook before": lambda layer, _: layer.linear.register_forward_pre_hook(lambda *_: None),
    "a hook on a gradient": lambda layer, _: layer.linear.weight.register_hook(lambda grad: grad),
    "the graph's module": lambda _, step: setattr(step, "model", nn.Sequential(Layer(), Layer())),
    "a module of the graph more": lambda _, step: setattr(step, "more", nn.Linear(1, 1)),
    "tied weights": lambda layer, step: setattr(layer.linear, "weight", step.model[0].linear.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    step = new_step()
    before = found(step)
    assert found(step) == before
    CHANGES[change](step.model[1], step)
    assert found(step) != before


def test_members_that_stay_are_found_once() -> None:
    step = new_step()
    members = step._members()
    assert step._members() is members
    step.model[1].factor = 3.0
    assert step._members() is not members


def test_nested_batches_are_named_and_arranged_as_torch_does() -> None:
    step, x = new_step(), torch.ones(2, 3)
    nested = {"a": [x, (x, 2, None)], "b": "text"}
    for _ in range(2):
        batch = batch_on(step, zg.mesh.line(1, 0, "ranks"), nested, more=x)
        assert batch.names == ("args[0]['a'][0]", "args[0]['a'][1][0]", "more")
        args, kwargs = batch.arranged(batch.tensors)
        assert args[0]["a"][1][1:] == (2, None)
        assert kwargs["more"] is batch.tensors[2]


class Unlisted:
    """A mapping that cannot be iterated over, like that of a scripted module's modules."""

    def __init__(self, **entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def keys(self) -> list[str]:
        return [*self.entries]

    def values(self) -> list[int]:
        return [*self.entries.values()]


CHANGED_TABLES: dict[str, Callable[[dict[str, Any], dict[str, Any], Unlisted], object]] = {
    "a value that is equal": lambda first, _, __: first.update(a=True),
    "a key": lambda first, _, __: first.update(c=first.pop("b")),
    "the order": lambda first, _, __: first.update(a=first.pop("a")),
    "an entry in the next table": lambda first, second, _: second.update(b=first.pop("b")),
    "an empty table": lambda _, second, __: second.update(a=1),
    "an entry of a mapping that cannot be iterated over": lambda _, __, third: third.entries.update(a=2),
    "its key": lambda _, __, third: setattr(third, "entries", {"b": 1}),
}


@pytest.mark.parametrize("change", CHANGED_TABLES.values(), ids=CHANGED_TABLES)
def test_a_change_of_any_table_is_seen(change: Callable[..., object]) -> None:
    tables: tuple[Any, ...] = {"a": 1, "b": 2}, {}, Unlisted(a=1)
    snapshot = Dictionaries(tables)
    assert snapshot.are_same()
    change(*tables)
    assert not snapshot.are_same()
