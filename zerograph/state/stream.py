"""Yield the whole tensors of a module bucket by bucket, under the names of its checkpoint, for serving engines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from zerograph._torch import version
from zerograph.errors import ConfigError
from zerograph.runtime.state import Store, gather_parts, store_of, stores_of

# Returns the tensors under their names in the checkpoint.
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def chosen_module(root: nn.Module, module: nn.Module | str | None) -> tuple[str, nn.Module]:
    """Return a module of a graph, and its name.

    Args:
        root: a module that has the modules of the graph as its children.
        module: one of them, or the name of its attribute; None: the only one that has parameters.

    Raises:
        ConfigError: there is no such module, or there are several and ``module`` is None.
    """
    children = {name: child for name, child in root.named_children() if any(True for _ in child.parameters())}
    if module is None and len(children) == 1:
        return next(iter(children.items()))
    for name, child in children.items():
        if child is module or name == module:
            return name, child
    names = ", ".join(children) or "none"
    if module is None:
        raise ConfigError(f"the graph has the modules with parameters {names}: say which")
    wrong = repr(module) if isinstance(module, str) else f"this {type(module).__name__}"
    raise ConfigError(f"{wrong} is not a module of the graph; those with parameters are {names}")


class Stream:
    """The plan by which a module's tensors are gathered and yielded.

    Attributes:
        stores: the buckets to gather, in order.
        names: the names of the state dict that a tensor has, by its ``id``; several for tied parameters.
    """

    def __init__(self, module: nn.Module, *, original_names: bool) -> None:
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        self._tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.names: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self.names.setdefault(id(tensor), []).append(name)
        self.stores = stores_of(tensor for tensor in self._tensors.values() if isinstance(tensor, nn.Parameter))
        self._versions = {store: _version(store) for store in self.stores}
        self._convert, self._groups = _conversion(module, self._tensors) if original_names else (dict, {})

    def has_changed(self, store: Store) -> bool:
        """Return whether a bucket is another one than when the stream began, or has been written to on this rank."""
        return store.is_released or store.is_unsharded or _version(store) != self._versions[store]

    def bucket(self, store: Store) -> Iterator[tuple[str, Tensor]]:
        """Gather a bucket and yield its tensors under their own names. A collective where it is split."""
        indices = [index for index, parameter in enumerate(store.parameters) if id(parameter) in self.names]
        for index, part in gather_parts(store, indices):
            yield from ((name, part) for name in self.names[id(store.parameters[index])])

    def plain(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the tensors that are in no bucket, such as buffers, under their own names."""
        for name, tensor in self._tensors.items():
            if store_of(tensor) is None:
                yield name, tensor.detach().clone()

    def converted(self, buckets: Iterator[Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under their names in the checkpoint, as soon as all tensors of a conversion are gathered."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for bucket in buckets:
            for name, tensor in bucket:
                group = self._groups.get(name, (name,))
                if len(group) == 1:
                    yield from self._convert({name: tensor}).items()
                    continue
                members = waiting.setdefault(group[0], {})
                members[name] = tensor
                if len(members) == len(group):
                    yield from self._convert(waiting.pop(group[0])).items()


def _version(store: Store) -> int:
    # In a file it has none.
    return version(store.flat) if isinstance(store.flat, Tensor) else 0


def _conversion(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Convert, Mapping[str, Sequence[str]]]:
    """Return the conversion to a checkpoint of transformers, and for each name those that are converted with it.

    transformers joins and splits weights as it loads them, and reverts that as it saves them.

    Raises:
        ConfigError: the conversion of a tensor depends on tensors besides those that are joined with it.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    except ImportError:
        return dict, {}
    if not isinstance(module, base):
        return dict, {}

    def convert(part: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            reverted: dict[str, Tensor] = loading.revert_weight_conversion(module, part)
        return reverted

    joined: dict[str, list[str]] = {}
    original = loading.apply_converters

    def record(name: str, converters: Any) -> Any:
        target, pattern = original(name, converters)
        joined.setdefault(target if pattern is not None else name, []).append(name)
        return target, pattern

    shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    with mock.patch.object(loading, "apply_converters", record):
        expected = set(convert(dict(shapes)))
    groups = {name: group for group in joined.values() for name in group}
    own = [groups.get(name, [name]) for name in tensors]
    apart = {target for group in own for target in convert({name: shapes[name] for name in group})}
    if apart != expected:
        raise ConfigError(
            f"the names of {type(module).__name__} in a checkpoint cannot be found bucket by bucket "
            f"({', '.join(sorted(apart ^ expected)[:3])})\nGive original_names=False for the names of the module."
        )
    return convert, groups
