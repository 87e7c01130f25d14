"""The Python values that an optimizer's ``step()`` can reach besides its parameters, and copies of them for a twin.

Also the state that a user's optimizer creates in its constructor, and that its first ``step()`` needs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base.contexts import replaced
from zerograph.capture.named_values import NamedValues, ValueStates
from zerograph.capture.places import CONTAINERS, Identity, Place, PythonState, is_users_object, token, walk
from zerograph.capture.state_changes import Snapshot
from zerograph.errors import CaptureError
from zerograph.runtime.state import flat_state, own_state

# Attributes that torch, its schedulers and zerograph set, and what is compared elsewhere. Tables of hooks are others.
_NOT_READ = {
    *("defaults", "param_groups", "state", "step", "state_dict", "load_state_dict"),
    *("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
}


def is_known(optimizer: Any) -> bool:
    """Return True for an optimizer of torch or ``flow.optim``: it computes with its groups and tensors alone."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "zerograph.compat.oneflow.optim."))


def attributes_read(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that its ``step()`` may read, by name."""
    own = own_attributes(optimizer).items()
    return {name: value for name, value in own if name not in _NOT_READ and "hooks" not in name}


def _shared(optimizer: Any) -> PythonState:
    """Return what twins share with it: attributes of the class, globals and closures of ``step()`` and functions."""
    functions = object.__new__(type(optimizer))
    held = itertools.chain(_own_places(optimizer), _places_of_groups(optimizer))
    functions_of = {place.name: value for place, value, _ in walk(held) if callable(value) or is_users_object(value)}
    vars(functions).update({name: value for name, value in functions_of.items() if not isinstance(value, nn.Module)})
    return PythonState(types.MethodType(_torch.unhooked_step(type(optimizer)), functions), nn.Module(), ())


def _own_places(optimizer: Any) -> list[tuple[Place, Any]]:
    return [(Place(optimizer, "self", (("attr", name),)), value) for name, value in attributes_read(optimizer).items()]


def _places_of_groups(optimizer: Any) -> list[tuple[Place, Any]]:
    return [
        (Place(group, "param_groups", (("key", key),)), value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("params", "lr")
    ]


def _inside(places: Iterable[tuple[Place, Any]]) -> Iterator[tuple[Place, Any]]:
    """Yield the values in places and in what these hold, and the lengths of containers."""
    for place, value, is_entered in walk(places):
        if not is_entered:
            yield place, value
        elif isinstance(value, CONTAINERS):
            length = place.at(("len", False))
            yield length, length.value()


def _comparable(value: Any) -> Hashable:
    """Return a number as it is, a tensor by identity and version: both would be constants of a graph.

    An array has its content besides, unless it is large.
    """
    if isinstance(value, Tensor):
        return Identity(value), _torch.version(value)
    if isinstance(value, numpy.ndarray):
        return Identity(value), token(value)
    return value if isinstance(value, (int, float)) and value == value else token(value)


def numbers_of(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer's ``step()`` can read besides tensors of a parameter's state, by location."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    places = _places_of_groups(optimizer)
    for owner, state in optimizer.state.items():
        is_own = id(owner) in parameters
        title = "state" if is_own else f"state[{owner!r:.40}]"
        entries = flat_state(state) if is_own else state
        places += [
            (Place(entries, title, (("key", key),)), value)
            for key, value in entries.items()
            if not is_own or not isinstance(value, Tensor)
        ]
    found = itertools.chain(_inside(places), _inside([*_own_places(optimizer), *_shared(optimizer).places()]))
    return {place.name: _comparable(value) for place, value in found}


def own_attributes(of: Any) -> dict[str, Any]:
    """Return the attributes of a parameter or an optimizer, without zerograph's."""
    return {name: value for name, value in vars(of).items() if not name.startswith("_zerograph")}


class Attributes:
    """The values that a compiled update depends on besides hyperparameters and tensors of the state.

    They are in attributes of the optimizer and of its parameters and in objects of its groups, or what ``step()`` and
    the functions there read by name.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._states = optimizer, ValueStates()
        self._named: tuple[list[Identity], NamedValues, str] | None = None

    def values(self, counts: Collection[str]) -> tuple[tuple[str, Hashable], ...]:
        """Return the present values by location, without the numbers that count steps."""
        optimizer, values = self._optimizer, list[tuple[str, Hashable]]()
        of_parameters = [
            (Place(parameter, f"param_groups[{number}]['params'][{index}]", (("attr", name),)), value)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            for name, value in own_attributes(parameter).items()
        ]
        for place, value in _inside([*_own_places(optimizer), *of_parameters]):
            if place.name not in counts:
                values.append((place.name, _told(value)))
        for place, value in _inside(_places_of_groups(optimizer)):
            # The rest is compared as hyperparameters.
            if callable(value) or any(kind == "attr" for kind, _ in place.steps):
                values.append((place.name, _told(value)))
        functions = [Identity(type(optimizer)), Identity(_torch.unhooked_step(type(optimizer)))]
        functions += [one for _, one in values if isinstance(one, Identity)]
        if self._named is None or self._named[0] != functions or not self._named[1].are_same():
            named = NamedValues(_shared(optimizer))
            self._named = functions, named, self._states.title_of(named)
        return *values, ("step()", functions[1]), ("values that step() reads by name", self._named[2])


def _told(value: Any) -> Hashable:
    """Return a tensor or an array as :func:`_comparable` does, a number with its sign and kind, an object itself."""
    if isinstance(value, (Tensor, numpy.ndarray)):
        return _comparable(value)
    one: Any = token(value)
    return Identity(value) if one[0] == "object" else one


def copied(value: Any, leaves: Mapping[int, Tensor]) -> Any:
    """Copy containers and objects of a user's class, with what is inside, so that a twin's step may change them.

    Args:
        value: an attribute of an optimizer, or an entry of a group.
        leaves: the twin's parameters by ``id`` of the optimizer's, which they replace; an ``id`` is replaced too.
    """
    if isinstance(value, Tensor):
        return leaves.get(id(value), value)
    if type(value) is int and value in leaves:
        return id(leaves[value])
    if isinstance(value, dict):
        entries = {copied(key, leaves): copied(entry, leaves) for key, entry in value.items()}
        return type(value)(value.default_factory, entries) if isinstance(value, defaultdict) else type(value)(entries)
    if isinstance(value, deque):
        return deque([copied(entry, leaves) for entry in value], value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(copied(entry, leaves) for entry in value)
    if is_users_object(value) and hasattr(value, "__dict__"):
        twin = copy.copy(value)
        vars(twin).update({name: copied(entry, leaves) for name, entry in vars(value).items()})
        return twin
    return value


def leaf_of(param: Tensor, grad: Tensor) -> nn.Parameter:
    """Return a parameter with these values and gradient."""
    leaf = nn.Parameter(param)
    leaf.grad = grad
    return leaf


def twin_of(optimizer: Any, leaves: Mapping[int, Tensor]) -> Any:
    """Return a copy of the optimizer without parameters and state, which its ``step()`` may change.

    Args:
        optimizer: the optimizer.
        leaves: parameters that replace the optimizer's in what it holds, by ``id`` of these.
    """
    # Not copy.copy(): optimizers drop further attributes of their classes. The step() that a scheduler sets on the
    # instance is left out, because the twin must run the class's.
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in ("step", "state", "param_groups"):
            is_number = isinstance(value, Tensor) and not value.dim() and id(value) not in leaves
            vars(twin)[name] = value.clone() if is_number else copied(value, leaves)
    _torch.mark_devices_checked(twin)
    return twin


@contextlib.contextmanager
def restored(optimizer: Any) -> Iterator[None]:
    """Restore what all instances of the optimizer's class share, and random generators, after steps of a twin.

    Raises:
        CaptureError: the steps drew random numbers of Python or numpy.
    """
    state = _shared(optimizer)
    before = Snapshot(state)
    try:
        yield
        if drawn := before.drawn(Snapshot(state)):
            raise CaptureError(
                f"{type(optimizer).__name__}.step() draws random numbers of {', '.join(drawn)}\n"
                "They would be drawn once, while the update is traced. Use another optimizer."
            )
    finally:
        before.restore()


def single_process() -> contextlib.AbstractContextManager[None]:
    """Make this thread seem to be the only process: optimizers that communicate then compute all by themselves."""
    thread = threading.get_ident()
    world, answers = torch.distributed, {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
    return replaced(
        (world, name, functools.partial(_answer, thread, answer, getattr(world, name)))
        for name, answer in answers.items()
    )


def _answer(thread: int, answer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return answer if threading.get_ident() == thread else plain(*args, **kwargs)


@dataclass(frozen=True)
class _Form:
    """A tensor of the state. Its values are loaded into the step; a trace has one number in their place.

    Attributes:
        shape: None for the parameter's own shape.
        number: the value of all elements if they are equal, else 1.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    number: Any = field(compare=False, repr=False)

    @classmethod
    def of(cls, value: Tensor, parameter: Tensor) -> _Form:
        """Return the form of a tensor of a parameter's state."""
        first = value.flatten()[:1]
        number = first.item() if value.numel() and bool((value == first).all()) else 1
        return cls(None if value.shape == parameter.shape else tuple(value.shape), value.dtype, number)

    def like(self, leaf: Tensor) -> Tensor:
        """Return a tensor of this form for another parameter."""
        if self.shape is None:
            return torch.full_like(leaf, self.number, dtype=self.dtype)
        return torch.full(self.shape, self.number, dtype=self.dtype, device=leaf.device if self.shape else "cpu")


# The state of a parameter as the optimizer's constructor has left it, with forms in place of tensors.
Constructed = dict[str, Any]


def state_like(constructed: Constructed, leaf: Tensor) -> dict[str, Any]:
    """Return such state for another parameter."""
    entries: dict[str, Any] = pytree.tree_map_only(_Form, lambda form: form.like(leaf), constructed)
    return entries


def constructed_for(optimizer: Any, parameter: Tensor) -> Constructed:
    """Return the state that the constructor has made for a parameter; it is empty if ``step()`` can do without.

    It is noted on the optimizer, whose state moves into the graph.
    """
    if is_known(optimizer):
        return {}
    noted: dict[int, Constructed] = vars(optimizer).setdefault("_zerograph_constructed", {})
    entries = own_state(optimizer).get(parameter)
    if entries and id(parameter) not in noted:
        forms = pytree.tree_map_only(Tensor, lambda value: _Form.of(value, parameter), dict(entries))
        noted[id(parameter)] = {} if _begins_empty(optimizer, parameter) else forms
    return noted.get(id(parameter), {})


def constructed_of(optimizer: Any, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype) -> Constructed:
    """Return :func:`constructed_for` the parameters of a group with this shape; of its first one if there is none.

    Raises:
        CaptureError: it is not the same for all of them.
    """
    if is_known(optimizer) or not group["params"]:
        return {}
    alike = [one for one in group["params"] if (one.shape or (1,)) == shape and one.dtype == dtype]
    first, *others = [constructed_for(optimizer, one) for one in alike or group["params"][:1]]
    if any(one != first for one in others):
        raise CaptureError(
            f"{type(optimizer).__name__} has other state for some parameters of shape {tuple(shape)} than for others\n"
            "Create the same state for all parameters of a group, or make a group for each kind."
        )
    return first


def _begins_empty(optimizer: Any, parameter: Tensor) -> bool:
    """Return whether a first step of a twin creates its state."""
    group = next(one for one in optimizer.param_groups if any(parameter is other for other in one["params"]))
    value = torch.ones((1,) * max(parameter.dim(), 1), dtype=parameter.dtype)
    twin = twin_of(optimizer, {})
    twin.param_groups, twin.state = [{**group, "params": [leaf_of(value, value.clone())]}], defaultdict(dict)
    try:
        with restored(optimizer), torch.no_grad(), _torch.compiling(), single_process():
            _torch.unhooked_step(type(twin))(twin)
    except KeyError:
        return False
    except Exception:
        # The trace of the update reports it.
        return True
    return True
