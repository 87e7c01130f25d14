"""A graph's state under the names that the plain module and optimizer would use, whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from zerograph import _torch
from zerograph.compiler.layout import plain_state
from zerograph.compiler.members import Members, parameters_of
from zerograph.errors import ConfigError
from zerograph.runtime.relayout import release
from zerograph.runtime.state import (
    Store,
    load_parameters,
    load_states,
    plain_parameters,
    plain_states,
    store_of,
    stores_of,
)
from zerograph.state.loadable import check_optimizer_state, taken
from zerograph.state.validate import check_scheduler


def modules_state(members: Members) -> dict[str, dict[str, Any]]:
    """What ``state_dict()`` of each module would be on one device, copied. A collective."""
    whole = _whole_parameters(members) | {name: buffer.clone() for name, buffer in members.buffers.items()}
    with _torch.with_tensors(members.root, _with_aliases(members, whole)):
        return {name: module.state_dict() for name, module in members.root.named_children()}


def read_modules(members: Members, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """What ``load_state_dict()`` of each module, strictly, would make of parameters and buffers, whole, by name.

    Raises:
        ConfigError: other modules, names or shapes.
    """
    # Modules without parameters and buffers have no state: a loss function, say, which need not be mentioned.
    children = dict(members.root.named_children())
    mine = {name: bool(module.state_dict(keep_vars=True)) for name, module in children.items()}
    _check_names(
        "modules",
        [name for name, has in mine.items() if has],
        [name for name, state in states.items() if state or mine.get(name, True)],
    )
    with torch.no_grad():
        whole: dict[str, Tensor] = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for name, parameter in members.parameters.items()
        } | {name: buffer.clone() for name, buffer in members.buffers.items()}
        with _torch.with_tensors(members.root, _with_aliases(members, whole)):
            for name, module in children.items():
                try:
                    module.load_state_dict(states.get(name, {}))
                except (RuntimeError, TypeError) as error:
                    raise ConfigError(f"the state of {name!r} does not fit the module: {error}") from None
    return whole


def load_modules(members: Members, whole: Mapping[str, Tensor]) -> None:
    """Put what :func:`read_modules` returned wherever parameters and buffers live. No collective."""
    with torch.no_grad():
        for name, buffer in members.buffers.items():
            buffer.copy_(whole[name])
        for store in stores_of(members.parameters.values()):
            load_parameters(store, [whole.get(name) for name in _names(members, store.parameters)])
        for name, parameter in members.parameters.items():
            if store_of(parameter) is None:
                parameter.copy_(whole[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` would be on one device. A collective."""
    parameters = list(parameters_of(optimizer))
    states: dict[int, Mapping[str, Tensor]] = {}
    for store in stores_of(parameters):
        if store.optimizer is optimizer:
            states |= {id(p): state for p, state in zip(store.parameters, plain_states(store), strict=True)}
    for parameter in parameters:
        if id(parameter) not in states:
            held = plain_state(optimizer, parameter)
            states[id(parameter)] = {
                # What it made for a global tensor is one too.
                name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
                for name, value in held.items()
            }
    numbered = {number: dict(states[id(parameter)]) for number, parameter in enumerate(parameters)}
    return {
        "state": {number: state for number, state in numbered.items() if state},
        "param_groups": numbered_groups(optimizer),
    }


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups as its ``state_dict()`` has them: with the numbers of their parameters."""
    groups, start = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(start, start + len(group["params"])))
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
        start += len(numbers)
    return groups


def check_state(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[LRScheduler | None], state: Any
) -> None:
    """Raise if what a graph's ``load_state_dict()`` was given is no state of it, nor a part of one.

    Modules are checked as they are read.

    Raises:
        ConfigError: something is of another type, belongs to nothing, or does not fit the optimizers or schedulers.
    """
    kinds: dict[str, Any] = {
        "modules": Mapping,
        "optimizers": Sequence,
        "lr_schedulers": Sequence,
        "steps_done": int,
        "grad_scaler": (Mapping, type(None)),
        "random": Mapping,
    }
    unknown = [repr(key) for key in state if key not in kinds] if isinstance(state, Mapping) else [f"{state!r:.60}"]
    if unknown or not state:
        raise ConfigError(
            f"not a state of a graph: it has {', '.join(unknown[:3]) or 'nothing'}; a state has {', '.join(kinds)}, or "
            'some of these\nOf a plain module give {"modules": {"model": state}}, by its attribute, of a plain '
            'optimizer {"optimizers": [state]}.'
        )
    for key, value in state.items():
        if not isinstance(value, kinds[key]) or isinstance(value, (str, bool)):
            wanted = "a list with one for each optimizer" if kinds[key] is Sequence else "what state_dict() has there"
            raise ConfigError(f"not a state of a graph: its {key} are {value!r:.60}\nGive {wanted}.")
    if state.get("steps_done", 0) < 0:
        raise ConfigError(f"not a state of a graph: steps_done = {state['steps_done']}")
    for name, one in state.get("modules", {}).items():
        if not isinstance(one, Mapping):
            raise ConfigError(
                f"not a state of a graph: that of the module {name!r:.60} is of the type {type(one).__name__}\n"
                'The state of a plain module goes under its attribute: {"modules": {"model": state}}.'
            )
    for key in ("optimizers", "lr_schedulers"):
        if key in state and len(state[key]) != len(optimizers):
            raise ConfigError(f"the graph has {len(optimizers)} optimizers, the state {len(state[key])} {key}")
    for optimizer, saved in zip(optimizers, state.get("optimizers", ()), strict=False):
        check_optimizer_state(optimizer, saved)
    for scheduler, saved in zip(schedulers, state.get("lr_schedulers", ()), strict=False):
        if scheduler is not None and saved is not None:
            check_scheduler(scheduler, saved)
    if "random" in state and not _is_random(state["random"]):
        raise ConfigError(f"not a state of a graph: its random numbers are {state['random']!r:.60}")


def _is_random(state: Mapping[str, Any]) -> bool:
    """Whether random numbers can follow from it: from a seed, or None, and a count."""
    seed, passes = state.get("seed", ""), state.get("passes")
    return (seed is None or type(seed) is int) and type(passes) is int and 0 <= passes < 2**63


def load_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Take the hyperparameters of saved groups. What these lack stays, where the class does not choose it."""
    made, _ = taken(optimizer, groups, {})
    _update_groups(optimizer, made)


def _update_groups(optimizer: torch.optim.Optimizer, made: Sequence[Mapping[str, Any]]) -> None:
    for group, one in zip(optimizer.param_groups, made, strict=True):
        group.update(one)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)``, into wherever its state lives. A collective."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = list(parameters_of(optimizer))
    given = {p: state.get("state", {}).get(number, {}) for p, number in zip(parameters, numbers, strict=True)}
    groups, made = taken(optimizer, state["param_groups"], given)
    held = {id(parameter): made.get(parameter, {}) for parameter in parameters}
    _update_groups(optimizer, groups)
    # What no step has trained yet has no state: its optimizer keeps it.
    for store in stores_of(parameters):
        if store.is_provisional:
            continue
        entries = [held.get(id(parameter), {}) for parameter in store.parameters]
        states = [{name: value for name, value in one.items() if value is not None} for one in entries]
        if store.optimizer is optimizer and _fits(store, states):
            load_states(store, states)
        else:
            release(store)
    for parameter in parameters:
        if (found := store_of(parameter)) is None or found.is_provisional:
            optimizer.state.pop(parameter, None)
            if held[id(parameter)]:
                optimizer.state[parameter] = {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in held[id(parameter)].items()
                }


def _fits(store: Store, states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the bucket can hold these: its own entries for all its parameters, and the same step counts."""
    scalars = [name for name in store.specs if name not in store.layouts]
    alike = {
        tuple(float(state[name]) for name in scalars) if set(store.specs) == set(state) else None for state in states
    }
    return len(alike) == 1 and (None not in alike or not any(states))


def _whole_parameters(members: Members) -> dict[str, Tensor]:
    whole = {name: p.detach().clone() for name, p in members.parameters.items() if store_of(p) is None}
    for store in stores_of(members.parameters.values()):
        whole |= dict(zip(_names(members, store.parameters), plain_parameters(store), strict=True))
    return whole


def _names(members: Members, parameters: Sequence[nn.Parameter]) -> list[str]:
    names = members.names()
    return [names.get(id(parameter), f"elsewhere{number}") for number, parameter in enumerate(parameters)]


def _with_aliases(members: Members, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    inside = {name: tensor for name, tensor in tensors.items() if not name.startswith("elsewhere")}
    return inside | {alias: tensors[name] for alias, name in members.aliases.items()}


def _check_names(what: str, mine: Sequence[str], theirs: Sequence[str]) -> None:
    if sorted(mine) != sorted(theirs):
        raise ConfigError(f"the graph has the {what} {', '.join(mine)}; the loaded state is of {', '.join(theirs)}")
