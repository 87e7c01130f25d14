"""A graph's state dict: whole tensors under the names that the plain module and optimizer use."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph import _torch
from zerograph.compiler.layout import plain_state
from zerograph.compiler.members import Members
from zerograph.errors import ConfigError
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.sbp import is_dtensor
from zerograph.runtime.checkpoint.file_tensor import FileTensor, open_safetensors
from zerograph.runtime.parameters import parameters_of
from zerograph.runtime.state import (
    Store,
    load_parameters,
    load_states,
    own_state,
    plain_parameters,
    plain_states,
    release,
    store_of,
    stores_of,
)
from zerograph.state.checks import convert_state


def whole_tensors(members: Members) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, whole, by name. A collective."""
    whole = {name: p.detach().clone() for name, p in members.parameters.items() if store_of(p) is None}
    for store in stores_of(members.parameters.values()):
        whole |= dict(zip(_names(members, store.parameters), plain_parameters(store), strict=True))
    return whole | {name: buffer.clone() for name, buffer in members.buffers.items()}


def modules_state(members: Members, whole: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return what ``state_dict()`` of each module would be on one device, of what :func:`whole_tensors` returned."""
    with _torch.with_tensors(members.root, _with_aliases(members, whole)):
        return {name: module.state_dict() for name, module in members.root.named_children()}


def read_modules(members: Members, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the whole parameters and buffers that a strict ``load_state_dict()`` of each module would load, by name.

    Parameters are tensors that refer to those of ``states``: nothing is copied, and nothing read from files.

    Args:
        states: the state of each module, by attribute. A module without state, such as a loss, may be left out.

    Raises:
        ConfigError: the modules, names or shapes are not those of the graph.
    """
    children = dict(members.root.named_children())
    has_state = {name: bool(module.state_dict(keep_vars=True)) for name, module in children.items()}
    own = [name for name, has in has_state.items() if has]
    loaded = [name for name, state in states.items() if state or has_state.get(name, True)]
    if sorted(own) != sorted(loaded):
        raise ConfigError(f"the graph has the modules {', '.join(own)}; the loaded state is of {', '.join(loaded)}")
    # Modules with a loading of their own may copy from memory that they then use again.
    values = (one for state in states.values() for one in state.values() if type(one) in (Tensor, nn.Parameter))
    lasting = {value.untyped_storage().data_ptr() for value in values if value.layout is torch.strided}
    with torch.no_grad():
        whole: dict[str, Tensor] = {
            name: FileTensor(parameter.shape, parameter.dtype, None, parameter.device, lasting)
            for name, parameter in members.parameters.items()
        } | {name: buffer.clone() for name, buffer in members.buffers.items()}
        with _torch.with_tensors(members.root, _with_aliases(members, whole)):
            for name, module in children.items():
                try:
                    module.load_state_dict(_with_tied(members, name, states.get(name, {})))
                except (RuntimeError, TypeError) as error:
                    raise ConfigError(f"the state of {name!r} does not fit the module: {error}") from None
    return whole


@contextlib.contextmanager
def kept_on_error(
    members: Members, schedulers: Sequence[LRScheduler | None] = (), scaler: GradScaler | None = None
) -> Iterator[None]:
    """Set back what the user's code loads by itself, the extra state of modules for one, if the block fails."""
    loaded: list[tuple[Any, Any]] = [
        (module.set_extra_state, module.get_extra_state) for module in with_extra_state(members).values()
    ]
    loaded += [(one.load_state_dict, one.state_dict) for one in (*schedulers, scaler) if one is not None]
    before = []
    for load, read in loaded:
        with contextlib.suppress(Exception):
            before.append((load, copy.deepcopy(read())))
    try:
        yield
    except BaseException:
        for load, state in before:
            with contextlib.suppress(Exception):
                load(state)
        raise


def load_schedulers(
    schedulers: Sequence[LRScheduler | None], scaler: GradScaler | None, state: Mapping[str, Any]
) -> None:
    """Load the states of schedulers and of the loss scale; one that is None, or not in ``state``, stays as it is."""
    for scheduler, saved in zip(schedulers, state.get("lr_schedulers", ()), strict="lr_schedulers" in state):
        if scheduler is not None and saved is not None:
            scheduler.load_state_dict(saved)
    if scaler is not None and state.get("grad_scaler") is not None:
        scaler.load_state_dict(state["grad_scaler"])


def with_extra_state(members: Members) -> dict[str, nn.Module]:
    """Return the modules whose ``state_dict()`` has extra state, by each of their qualified names."""
    plain, named = nn.Module.get_extra_state, members.root.named_modules(remove_duplicate=False)
    return {name: one for name, one in named if type(one).get_extra_state is not plain}


def open_files(state: Any) -> Any:
    """Return a graph's state with the tensors of safetensors files, not read yet, in place of paths of modules.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    modules = state.get("modules") if isinstance(state, Mapping) else None
    if not isinstance(modules, Mapping):
        return state
    opened = {
        name: open_safetensors(module) if isinstance(module, (str, os.PathLike)) else module
        for name, module in modules.items()
    }
    return {**state, "modules": opened}


def _with_tied(members: Members, module: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state with all names of tied parameters; files hold tied parameters once."""
    if not state or not all(isinstance(value, FileTensor) for value in state.values()):
        return state
    start = f"{module}."
    complete = dict(state)
    names_of: dict[str, list[str]] = {}
    for alias, name in members.aliases.items():
        names_of.setdefault(name, [name]).append(alias)
    for names in names_of.values():
        own = [name.removeprefix(start) for name in names if name.startswith(start)]
        saved = next((state[name] for name in own if name in state), None)
        if saved is not None:
            complete = dict.fromkeys(own, saved) | complete
    return complete


def load_modules(members: Members, whole: Mapping[str, Tensor]) -> None:
    """Copy the tensors that :func:`read_modules` returned to the parameters and buffers. Not a collective."""
    with torch.no_grad():
        for name, buffer in members.buffers.items():
            buffer.copy_(whole[name])
        for store in stores_of(members.parameters.values()):
            load_parameters(store, [whole.get(name) for name in _names(members, store.parameters)])
        for name, parameter in members.parameters.items():
            if store_of(parameter) is None:
                parameter.copy_(whole[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what ``optimizer.state_dict()`` would be on one device. A collective."""
    parameters = parameters_of(optimizer)
    states: dict[int, Mapping[str, Tensor]] = {}
    for store in stores_of(parameters):
        if store.optimizer is optimizer:
            states |= {id(p): state for p, state in zip(store.parameters, plain_states(store), strict=True)}
    for parameter in parameters:
        if id(parameter) not in states:
            states[id(parameter)] = {
                # The state of a global tensor is global too.
                name: value.full_tensor() if is_dtensor(value) else copy.deepcopy(value)
                for name, value in plain_state(optimizer, parameter).items()
            }
    numbered = {number: dict(states[id(parameter)]) for number, parameter in enumerate(parameters)}
    return {
        "state": {number: state for number, state in numbered.items() if state},
        "param_groups": numbered_groups(optimizer),
    }


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups as in its ``state_dict()``: with numbers in place of parameters."""
    groups, start = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(start, start + len(group["params"])))
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
        start += len(numbers)
    return groups


def load_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Load the hyperparameters of saved groups. A hyperparameter that is missing keeps its value or gets a default."""
    converted, _ = convert_state(optimizer, groups, {})
    _update_groups(optimizer, converted)


def _update_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for own, loaded in zip(optimizer.param_groups, groups, strict=True):
        own.update(loaded)
        # As torch does: "initial_lr" of a scheduler since would be the rate that the next one starts from.
        for name in own.keys() - loaded.keys() - optimizer.defaults.keys() - {"params"}:
            del own[name]


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a plain optimizer's state into the stores of its parameters, or into the optimizer. A collective."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = parameters_of(optimizer)
    saved = {p: state.get("state", {}).get(number, {}) for p, number in zip(parameters, numbers, strict=True)}
    groups, converted = convert_state(optimizer, state["param_groups"], saved)
    entries = {id(parameter): converted.get(parameter, {}) for parameter in parameters}
    _update_groups(optimizer, groups)

    def keeps_none(store: Store | None) -> bool:
        """Return True if the optimizer itself keeps the state of the store's parameter."""
        return store is None or (store.is_provisional and store.optimizer is not optimizer)

    for store in stores_of(parameters):
        if keeps_none(store):
            continue
        states = [
            {name: value for name, value in entries.get(id(parameter), {}).items() if value is not None}
            for parameter in store.parameters
        ]
        if store.optimizer is optimizer and _fits(store, states):
            load_states(store, states)
        else:
            release(store)
    own = own_state(optimizer)
    # A store may have returned the state of a parameter that was replaced.
    for key in [one for one in own if isinstance(one, nn.Parameter)]:
        if id(key) not in entries or keeps_none(store_of(key)):
            del own[key]
    for parameter in parameters:
        if keeps_none(store_of(parameter)) and entries[id(parameter)]:
            own[parameter] = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in entries[id(parameter)].items()
            }


def _fits(store: Store, states: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the store can hold these states: all have its entries, or none has any, and equal step counts."""
    scalars = [name for name in store.specs if name not in store.layouts]
    counts = {
        tuple(float(state[name]) for name in scalars) if set(store.specs) == set(state) else None for state in states
    }
    return len(counts) == 1 and (None not in counts or not any(states))


def _names(members: Members, parameters: Sequence[nn.Parameter]) -> list[str]:
    names = members.names
    return [names.get(id(parameter), f"elsewhere{number}") for number, parameter in enumerate(parameters)]


def _with_aliases(members: Members, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("elsewhere")}
    return own | {alias: tensors[name] for alias, name in members.aliases.items()}
