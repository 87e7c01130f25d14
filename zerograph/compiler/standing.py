"""The state that the last step was chosen by: where all of it is unchanged, the next call runs the same step.

The comparison is object by object. It allocates next to nothing, whereas the facts that a compiled step is looked up by
take longer to collect than a small step to run. Any difference leads back to those facts, which decide.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base.dictionaries import Dictionaries
from zerograph.compiler.batch import Batch, leaves_of
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.members import Optimizers, Tree
from zerograph.config import Config
from zerograph.ir.annotate import is_replicated
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.state import stores_of

# No compiled step depends on these values.
_NO_CONSTANTS = frozenset({"params", "lr", "initial_lr"})
_IMMUTABLE = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Standing:
    """A snapshot of the job, the graph's attributes, members, optimizers, options and batch, with their step."""

    def __init__(
        self,
        job: Job,
        attributes: Mapping[str, Any],
        tree: Tree,
        optimizers: Optimizers,
        config: Config,
        batch: Batch,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        step: CompiledStep,
        number: int,
    ) -> None:
        self.step, self.number, self.stores = step, number, stores_of(tree.members.parameters.values())
        self._job, self._config, self._tree = job, config, tree
        self._attributes = list(attributes.items())
        parameters: Iterable[nn.Parameter] = tree.members.parameters.values()
        self._tensors: list[Tensor] = [*parameters, *tree.members.buffers.values()]
        self._metadata = _metadata(self._tensors)
        self._fresh = [store.fresh for store in self.stores]
        hooks = [table for optimizer in optimizers for table in _torch.step_pre_hook_tables(optimizer)]
        # A parameter's own attributes are its annotation and the store that holds it.
        self._dictionaries = Dictionaries([vars(config), *map(vars, parameters), *hooks])
        self._optimizers = [(optimizer, type(optimizer)) for optimizer in optimizers]
        self._groups = [_Group(group) for optimizer in optimizers for group in optimizer.param_groups]
        leaves: list[Any] = []
        self._nesting = leaves_of(arguments, leaves)
        # Without its tensors, which live no longer than their step.
        self._batch = batch.with_tensors(())
        self._inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in batch.tensors]
        self._leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def batch(
        self,
        job: Job,
        attributes: Mapping[str, Any],
        optimizers: Optimizers,
        config: Config,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Batch | None:
        """Return these arguments as the batch of :attr:`step`, or None where anything differs from the snapshot."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        unchanged = (
            job is self._job
            and config is self._config
            and self._dictionaries.are_same()
            and list(attributes) == [name for name, _ in self._attributes]
            and all(map(operator.is_, attributes.values(), [value for _, value in self._attributes]))
            and self._tree.is_same_below()
            and _metadata(self._tensors) == self._metadata
            and not _torch.has_gradient_hooks(self._tree.members.parameters.values())
            and [store.fresh for store in self.stores] == self._fresh
            and len(optimizers) == len(self._optimizers)
            and all(
                optimizer is before and type(optimizer) is kind
                for optimizer, (before, kind) in zip(optimizers, self._optimizers, strict=True)
            )
            and len(groups) == len(self._groups)
            and all(before.is_same(group) for before, group in zip(self._groups, groups, strict=True))
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_autocast_enabled("cuda")
        )
        return self._read(arguments) if unchanged else None

    def _read(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Batch | None:
        leaves: list[Any] = []
        nesting = leaves_of(arguments, leaves)
        if nesting is None or nesting != self._nesting:
            return None
        tensors: list[Tensor] = []
        for leaf, constant in zip(leaves, self._leaves, strict=True):
            if constant is not None:
                if leaf is not constant[0]:
                    return None
                continue
            if not isinstance(leaf, Tensor):
                return None
            if (
                (leaf.shape, leaf.dtype, leaf.device) != self._inputs[len(tensors)]
                or leaf.layout is not torch.strided
                or leaf.requires_grad
                or is_replicated(leaf)
            ):
                return None
            tensors.append(leaf.contiguous())
        return self._batch.with_tensors(tuple(tensors))


def standing_of(
    job: Job,
    attributes: Mapping[str, Any],
    tree: Tree,
    optimizers: Optimizers,
    config: Config,
    batch: Batch,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    step: CompiledStep,
    number: int,
) -> Standing | None:
    """Return the snapshot; None where equal objects do not mean an equal state.

    So it is with global tensors, hooks on gradients, and hyperparameters that can change in place.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    if (
        batch.mesh is not None
        or _torch.has_gradient_hooks(tree.members.parameters.values())
        or not all(map(_Group.is_comparable, groups))
    ):
        return None
    return Standing(job, attributes, tree, optimizers, config, batch, arguments, step, number)


@dataclass(eq=False)
class _Group:
    """The hyperparameters of an optimizer's group that a compiled step depends on, and its parameters."""

    group: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._size = len(self.group)
        self._names = [name for name in self.group if name not in _NO_CONSTANTS]
        self._values = [self.group[name] for name in self._names]
        self._parameters = list(self.group["params"])

    def is_same(self, group: Mapping[str, Any]) -> bool:
        """Return whether this is the same group, with the same objects."""
        parameters: Sequence[Any] = group["params"]
        return (
            group is self.group
            and len(group) == self._size
            and all(map(operator.is_, map(group.get, self._names), self._values))
            and len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
        )

    @staticmethod
    def is_comparable(group: Mapping[str, Any]) -> bool:
        """Return whether no hyperparameter can change in place."""
        values = (value for name, value in group.items() if name not in _NO_CONSTANTS)
        return all(map(_is_immutable, values))


def _is_immutable(value: Any) -> bool:
    return all(map(_is_immutable, value)) if type(value) is tuple else type(value) in _IMMUTABLE


def _metadata(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    with _torch.plain_tensors():
        return [(one.shape, one.dtype, one.device, one.requires_grad) for one in tensors]
