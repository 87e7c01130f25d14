"""Whether an optimizer can take a state, asked before anything changes, and what its class makes of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zerograph.errors import ConfigError
from zerograph.optim.entries import Entries, Shape
from zerograph.state.validate import check_hyperparameters

Groups = Sequence[Mapping[str, Any]]


def taken(
    optimizer: torch.optim.Optimizer, groups: Groups, states: Mapping[Any, Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], Mapping[Any, dict[str, Any]]]:
    """What ``optimizer.load_state_dict()`` would make of groups and of states, by parameter; it stays as it is.

    Groups are copies, without parameters. Their class has the last word: it adds what older states lack, and AdamW
    stays AdamW, whatever a state of Adam says.
    """
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), defaults=dict(optimizer.defaults))
    given = [
        {**copy.deepcopy({key: value for key, value in one.items() if key != "params"}), "params": mine["params"]}
        for mine, one in zip(optimizer.param_groups, groups, strict=True)
    ]
    held = defaultdict(dict, {parameter: dict(state) for parameter, state in states.items() if state})
    twin.__setstate__({"state": held, "param_groups": given})
    return [{key: value for key, value in one.items() if key != "params"} for one in twin.param_groups], twin.state


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise if ``state`` is not what ``state_dict()`` of such an optimizer returns.

    Raises:
        ConfigError: it is no state of an optimizer, of another one, or of other parameters.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, Sequence) or not all(
        isinstance(one, Mapping) and isinstance(one.get("params"), Sequence) for one in groups
    ):
        raise ConfigError(f"{state!r:.60} is no state of an optimizer: it has no param_groups with their params")
    held = state.get("state", {})
    if not isinstance(held, Mapping) or not all(isinstance(one, Mapping) for one in held.values()):
        raise ConfigError(f"{held!r:.60} is no state of parameters: give what state_dict() of the optimizer returned")
    check_groups(optimizer, groups)
    _check_numbers(optimizer, groups, held)
    check_hyperparameters(optimizer, groups)
    shapes = {
        number: {name: _shape(value) for name, value in one.items() if value is not None}
        for number, one in held.items()
    }
    check_entries(optimizer, groups, shapes)


def check_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Raise if these are not the groups of such an optimizer.

    Raises:
        ConfigError: groups of other sizes, or with the hyperparameters of another optimizer.
    """
    kind = type(optimizer).__name__
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if mine != theirs:
        raise ConfigError(
            f"{kind} has groups of {mine} parameters, the loaded state of {theirs}\n"
            "Build the optimizer as it was when the state was saved."
        )
    made, _ = taken(optimizer, groups, {})
    for own, given, one in zip(optimizer.param_groups, groups, made, strict=True):
        lacking = [key for key in optimizer.defaults if key in own and key not in one]
        # Schedulers leave something in groups, and users do; and a part of a group may do.
        foreign = [key for key in given if key not in own and key != "initial_lr"]
        if lacking and foreign:
            raise ConfigError(
                f"the state is of another optimizer than {kind}: its groups have {', '.join(foreign[:3])}, and no "
                f"{', '.join(lacking[:3])}\nBuild the optimizer as it was when the state was saved."
            )


def _check_numbers(optimizer: torch.optim.Optimizer, groups: Groups, held: Mapping[Any, Any]) -> None:
    numbers = [number for group in groups for number in group["params"]]
    try:
        distinct = len(set(numbers)) == len(numbers)
    except TypeError:
        distinct = False
    if not distinct:
        raise ConfigError(
            f"the parameters of {type(optimizer).__name__} have the numbers {numbers!r:.60}: give each its own"
        )
    if held and not held.keys() & set(numbers):
        raise ConfigError(
            f"the parameters of {type(optimizer).__name__} have the numbers {numbers!r:.60}, "
            f"their state is of {list(held)!r:.60}"
        )


def check_entries(
    optimizer: torch.optim.Optimizer, groups: Groups, shapes: Mapping[Any, Mapping[str, Shape | str]]
) -> None:
    """Raise if a parameter's state is not what the optimizer's update needs, with the hyperparameters of ``groups``.

    Entries that it does not know are left alone, as torch leaves them.

    Args:
        shapes: of a parameter's entries by name, by the parameter's number; the type of what has none.

    Raises:
        ConfigError: naming the parameter.
    """
    kind = type(optimizer).__name__
    entries = Entries(optimizer)
    made, _ = taken(optimizer, groups, {})
    for mine, given, one in zip(optimizer.param_groups, groups, made, strict=True):
        for parameter, number in zip(mine["params"], given["params"], strict=True):
            found = shapes.get(number)
            needed = entries.of({**mine, **one}, parameter) if found else None
            if not found or needed is None:
                continue
            if not needed.keys() <= found.keys():
                raise ConfigError(
                    f"the state has {', '.join(sorted(found))} of parameter {number} of {kind}, whose update needs "
                    f"{', '.join(needed)}\nIt is the state of another optimizer, or of parameters in another order."
                )
            for name, shape in needed.items():
                if found[name] != shape:
                    raise ConfigError(
                        f"{name} of parameter {number} of {kind} is of shape {shape}, the loaded state has one of "
                        f"{found[name]}\nIt is the state of another model, or of parameters in another order."
                    )


def _shape(value: Any) -> Shape | str:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return () if isinstance(value, Number) else type(value).__name__
