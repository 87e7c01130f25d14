"""``optimizer.state`` while stores hold the optimizer's state: whole and writable in a block, an error elsewhere."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.errors import SplitParameterError
from zerograph.runtime.job.process_group import Job, agree
from zerograph.runtime.state import plain_states, store_of, stores_of
from zerograph.runtime.tensor_hash import hash_bits


class StoredState(MutableMapping[Any, Any]):
    """The attribute ``state`` of an optimizer whose state is in stores.

    Inside ``full_parameters()`` it is whole from the first access on, and may be written. Elsewhere an access is an
    error while the stores have state; before the first update the mapping is empty, as that of a plain optimizer.

    Attributes:
        optimizer: the optimizer.
        plain: the state that is in no store, by parameter.
        whole: the state of all parameters, inside the block and after the first access; else None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain: MutableMapping[Any, Any]) -> None:
        self.optimizer, self.plain = optimizer, plain
        self.whole: defaultdict[Any, Any] | None = None
        self._before: dict[str, str] = {}
        self._job: Job | None = None

    def open(self, job: Job) -> None:
        """Let the state be read and written until :meth:`close`."""
        self._job = job

    def written(self) -> dict[str, str] | None:
        """Return hashes of the whole state by name if it was read since :meth:`open`, else None."""
        return None if self.whole is None else _hashes(self._numbered())

    def changes(self) -> dict[int, dict[str, Any]] | None:
        """Return the state as the block has left it, by number of the parameter, or None if nothing was changed."""
        if self.whole is None or _hashes(self._numbered()) == self._before:
            return None
        return self._numbered()

    def close(self) -> None:
        """Drop the whole state."""
        self.whole, self._job, self._before = None, None, {}

    def _numbered(self) -> dict[int, dict[str, Any]]:
        assert self.whole is not None
        numbers = {id(parameter): number for number, parameter in enumerate(_parameters(self.optimizer))}
        strange = [key for key in self.whole if id(key) not in numbers]
        if strange:
            raise SplitParameterError(
                f"{type(self.optimizer).__name__}.state has an entry for {strange[0]!r:.60}, which is none of its "
                "parameters: state of the optimizer as a whole cannot be kept in a graph"
            )
        return {numbers[id(key)]: dict(entries) for key, entries in self.whole.items() if entries}

    def _entries(self, *, reads: bool = False) -> MutableMapping[Any, Any]:
        stores = [store for store in stores_of(_parameters(self.optimizer)) if store.optimizer is self.optimizer]
        if not stores:
            return self.plain
        if self._job is not None:
            if self.whole is None:
                agree(self._job, f"reading {type(self.optimizer).__name__}.state", 0, dict)
                self.whole = defaultdict(dict, {key: dict(entries) for key, entries in self.plain.items()})
                for store in stores:
                    states = zip(store.parameters, plain_states(store), strict=True)
                    self.whole |= {p: state for p, state in states if state and store_of(p) is store}
                self._before = _hashes(self._numbered())
            return self.whole
        if reads and all(store.fresh for store in stores):
            return self.plain
        raise SplitParameterError(
            f"{type(self.optimizer).__name__}.state is read or changed, but a graph has the state in shards\n"
            "Save it by state_dict() and change it by load_state_dict(), of the optimizer after zg.prepare() or of the "
            "graph. Or use it inside 'with zg.full_parameters(model):' or 'with step.full_parameters():', on all ranks."
        )

    def __getitem__(self, key: Any) -> Any:
        return self._entries()[key]

    def copy(self) -> dict[Any, Any]:
        """Return the state as a dictionary."""
        return dict(self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or the default."""
        return self._entries(reads=True).get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._entries(reads=True)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._entries()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._entries()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries(reads=True))

    def __len__(self) -> int:
        return len(self._entries(reads=True))

    def __bool__(self) -> bool:
        """Return whether there is state, in stores or not; torch's checkpoints ask before they call state_dict()."""
        stores = stores_of(_parameters(self.optimizer))
        return bool(self.plain) or any(store.optimizer is self.optimizer and not store.fresh for store in stores)

    def __repr__(self) -> str:
        return f"<state of {type(self.optimizer).__name__} in a graph>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self._entries(reads=True)))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(defaultdict(dict, self._entries(reads=True)), memo)


def own_state(optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
    """Return the state that the optimizer itself holds, by parameter: that which is in no store."""
    state: Any = optimizer.state
    return state.plain if isinstance(state, StoredState) else state


def guard_state(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.state`` a :class:`StoredState`."""
    if not isinstance(optimizer.state, StoredState):
        optimizer.state = StoredState(optimizer, optimizer.state)  # type: ignore[assignment]


def guarded_state(optimizer: torch.optim.Optimizer | None) -> StoredState | None:
    """Return the mapping that stands for the optimizer's state in stores, or None."""
    state = None if optimizer is None else optimizer.state
    return state if isinstance(state, StoredState) else None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _hashes(states: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Return a hash of each entry by name."""
    return {
        f"state {name!r} of parameter {number}": text_of(value)
        for number, entries in sorted(states.items())
        for name, value in entries.items()
    }


# Elements of a tensor that a text shows.
_MOST_SHOWN = 16


def text_of(value: Any) -> str:
    """Return text that is equal for equal values: of a tensor its shape, dtype, and values or a hash."""
    if isinstance(value, Tensor):
        content = f"bits {int(hash_bits(value)) % 2**64:#018x}" if value.numel() > _MOST_SHOWN else value.tolist()
        return f"{tuple(value.shape)} {value.dtype} {content}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {text_of(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, bytes)) else type(value).__name__
