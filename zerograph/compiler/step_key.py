"""The key of a step: all that selects it besides sizes, and the snapshot by which equal calls in a row share one key.

The snapshot compares object by object and allocates next to nothing. Collecting the facts of a key takes longer than
running a small step. Any difference leads back to those facts, which decide.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base.dictionaries import Dictionaries
from zerograph.compiler.batch import Batch, collect_leaves
from zerograph.compiler.dimensions import Kind, Mode
from zerograph.compiler.members import Optimizers, Tree
from zerograph.config import Config
from zerograph.ir.annotate import is_replicated
from zerograph.ir.marks import marks_of
from zerograph.passes.context import GradientUse
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.state import stores_of


@dataclass(frozen=True)
class StepRequest:
    """The request of a caller for a step, besides options.

    Attributes:
        reads_metric: a scheduler reads the first 0-d tensor that ``build()`` returns.
        gradients: the use of gradients in graphs with optimizers.
        accumulated: the parameters whose accumulated gradients a graph updates by, by name.
        early_outputs: number of outputs, the first ones, that the loop reads before backward.
        pure: ``build()`` must change no Python state and mean what it means in plain PyTorch; the trace is an error
            otherwise.
        differentiated: the results, by number, that backward starts from; None: all.
        compares_inputs: look for inputs that the ranks may have passed whole by mistake.
    """

    reads_metric: bool = False
    gradients: GradientUse = "update"
    accumulated: tuple[str, ...] = ()
    early_outputs: int = 0
    pure: bool = False
    differentiated: frozenset[int] | None = None
    compares_inputs: bool = True

    def texts(self) -> dict[str, str]:
        """Return what a step that another process has rewritten depends on, as text by name."""
        return {
            "the use of gradients": self.gradients,
            "accumulated gradients": ", ".join(self.accumulated),
            "outputs that are read before backward": str(self.early_outputs),
            "results that are differentiated": "all"
            if self.differentiated is None
            else str(sorted(self.differentiated)),
        }


@dataclass(frozen=True)
class StepKey:
    """All that selects a step besides the sizes of the inputs. Equal keys and sizes select equal steps.

    Attributes:
        facts: what the captured graph depends on besides its inputs: name and value.
        config: key of the graph's options.
        request: what the caller asks for.
        layout: the store of each parameter.
        pattern: the inputs without their sizes, and their marks.
        mode: ``config.dynamic_shapes``; False for a backend that is a function, which gets each size by itself.
        digest: equal on ranks whose keys are equal but for the layout; 0 in a job of one rank.
    """

    facts: tuple[tuple[str, Any], ...]
    config: Hashable
    request: StepRequest
    layout: Hashable
    pattern: tuple[Hashable, Hashable]
    mode: Mode
    digest: int = field(default=0, compare=False)

    @property
    def kind(self) -> Kind:
        """The kind of inputs whose sizes are followed. A mark counts for later calls of the same kind too."""
        return self.pattern[0], self.mode

    def of_capture(self, batch: Batch) -> Hashable:
        """Return the part that the captured graph depends on, for a batch whose sizes are resolved."""
        return self.facts, batch.key()

    def of_step(self, batch: Batch) -> Hashable:
        """Return the key of the step for a batch whose sizes are resolved."""
        return self.of_capture(batch), self.config, self.request, self.layout

    def texts(self, configuration: str) -> dict[str, str]:
        """Return the facts, options and request as text by name, equal on ranks where they are.

        Parameters, buffers and modules are one entry each, so that a difference has a short name.

        Args:
            configuration: the options as text.
        """
        return {"configuration": configuration, **texts_of_facts(dict(self.facts)), **self.request.texts()}


def texts_of_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return facts as text by name."""
    shown: dict[str, str] = {}
    for name, value in facts.items():
        if name in ("parameters", "buffers", "modules"):
            shown |= {f"{name}: {entry[0] or 'the graph'}": str(entry[1:]) for entry in value}
        else:
            shown[name] = str(value)
    return shown


# No compiled step depends on these values.
_NOT_COMPARED = frozenset({"params", "lr", "initial_lr"})
_IS_FRESH = operator.attrgetter("fresh")
_IMMUTABLE = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(eq=False, slots=True)
class Call:
    """A call of a graph: its arguments, and the objects of the graph that they meet.

    Attributes:
        job: the ranks.
        attributes: the graph's public attributes, by name.
        optimizers: those of the graph, in order of registration.
        of_optimizers: returns the attributes of users' optimizers, with their values.
        config: the graph's options.
        request: what the caller asks for.
        arguments: ``(args, kwargs)``.
    """

    job: Job
    attributes: Mapping[str, Any]
    optimizers: Optimizers
    of_optimizers: Callable[[], Hashable]
    config: Config
    request: StepRequest
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


class Snapshot:
    """The objects that a call depended on, and the key of its step.

    Args:
        call: the call.
        tree: the graph's members.
        batch: the call's arguments, as they were read.
        key: the key of the step of the call.
    """

    def __init__(self, call: Call, tree: Tree, batch: Batch, key: StepKey) -> None:
        self.key, self.stores = key, stores_of(tree.members.parameters.values())
        self._job, self._config, self._tree = call.job, call.config, tree
        self._attributes, self._values = list(call.attributes), list(call.attributes.values())
        parameters: Iterable[nn.Parameter] = tree.members.parameters.values()
        self._tensors: list[Tensor] = [*parameters, *tree.members.buffers.values()]
        self._metadata = _metadata(self._tensors)
        self._fresh = list(map(_IS_FRESH, self.stores))
        hooks = [table for optimizer in call.optimizers for table in _torch.step_pre_hook_tables(optimizer)]
        # A parameter's own attributes are its annotation and its store.
        self._dictionaries = Dictionaries([*map(vars, call.config.parts()), *map(vars, parameters), *hooks])
        self._optimizers, self._classes = list(call.optimizers), list(map(type, call.optimizers))
        self._groups = [_Group(group) for optimizer in call.optimizers for group in optimizer.param_groups]
        self._of_optimizers, self._default_dtype = call.of_optimizers(), torch.get_default_dtype()
        leaves: list[Any] = []
        self._nesting = collect_leaves(call.arguments, leaves)
        # Without its tensors, which live no longer than their step.
        self._batch = batch.with_tensors(())
        # Sizes of the parts of a batch may differ in each call.
        self._inputs = [
            (tensor.dim() if plain and not whole else tensor.shape, tensor.dtype, tensor.device, marks)
            for tensor, plain, whole, marks in zip(batch.tensors, batch.plain, batch.whole, batch.marks, strict=True)
        ]
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def match(self, call: Call) -> Batch | None:
        """Return the call's arguments as a batch of the step, or None if anything differs from the snapshot."""
        groups = [group for optimizer in call.optimizers for group in optimizer.param_groups]
        unchanged = (
            call.job is self._job
            and call.config is self._config
            and (call.request is self.key.request or call.request == self.key.request)
            and self._dictionaries.are_same()
            and list(call.attributes) == self._attributes
            and all(map(operator.is_, call.attributes.values(), self._values))
            and self._tree.is_same_below()
            and _metadata(self._tensors) == self._metadata
            and not _torch.has_gradient_hooks(self._tree.members.parameters.values())
            and list(map(_IS_FRESH, self.stores)) == self._fresh
            and len(call.optimizers) == len(self._optimizers)
            and all(map(operator.is_, call.optimizers, self._optimizers))
            and list(map(type, call.optimizers)) == self._classes
            and len(groups) == len(self._groups)
            and all(before.is_same(group) for before, group in zip(self._groups, groups, strict=True))
            and call.of_optimizers() == self._of_optimizers
            and torch.get_default_dtype() is self._default_dtype
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_autocast_enabled("cuda")
        )
        return self._read(call.arguments) if unchanged else None

    def _read(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Batch | None:
        """Return the arguments as a batch, or None if their nesting, metadata or constants differ."""
        leaves: list[Any] = []
        nesting = collect_leaves(arguments, leaves)
        if nesting is None or nesting != self._nesting:
            return None
        tensors: list[Tensor] = []
        for leaf, constant in zip(leaves, self._constants, strict=True):
            if constant is not None:
                if leaf is not constant[0]:
                    return None
                continue
            if not isinstance(leaf, Tensor):
                return None
            shape, dtype, device, marks = self._inputs[len(tensors)]
            if (
                (leaf.dim() if isinstance(shape, int) else leaf.shape) != shape
                or (leaf.dtype, leaf.device, marks_of(leaf)) != (dtype, device, marks)
                or leaf.layout is not torch.strided
                or leaf.requires_grad
                or is_replicated(leaf)
            ):
                return None
            tensors.append(leaf.contiguous())
        return self._batch.with_tensors(tuple(tensors))


def take_snapshot(call: Call, tree: Tree, batch: Batch, key: StepKey) -> Snapshot | None:
    """Return the snapshot of a call, or None where identical objects may still have changed.

    That is so for global tensors, hooks on gradients, and hyperparameters that can change in place. Pieces of whole
    sequences are cut at each call. The arguments are those of :class:`Snapshot`.
    """
    groups = (group for optimizer in call.optimizers for group in optimizer.param_groups)
    if (
        batch.mesh is not None
        or batch.passed
        or _torch.has_gradient_hooks(tree.members.parameters.values())
        or not all(map(_Group.is_comparable, groups))
    ):
        return None
    return Snapshot(call, tree, batch, key)


@dataclass(eq=False)
class _Group:
    """The parameters of an optimizer's group, and the hyperparameters that a compiled step depends on."""

    group: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._size, self._has_rate = len(self.group), self.group.get("lr") is not None
        self._names = [name for name in self.group if name not in _NOT_COMPARED]
        self._values = [self.group[name] for name in self._names]
        self._parameters = list(self.group["params"])

    def is_same(self, group: Mapping[str, Any]) -> bool:
        """Return True if this is the same group, with the same objects."""
        parameters: Sequence[Any] = group["params"]
        return (
            group is self.group
            and len(group) == self._size
            and (group.get("lr") is not None) == self._has_rate
            and all(map(operator.is_, map(group.get, self._names), self._values))
            and len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
        )

    @staticmethod
    def is_comparable(group: Mapping[str, Any]) -> bool:
        """Return True if no hyperparameter can change in place."""
        values = (value for name, value in group.items() if name not in _NOT_COMPARED)
        return all(map(_is_immutable, values))


def _is_immutable(value: Any) -> bool:
    return all(map(_is_immutable, value)) if type(value) is tuple else type(value) in _IMMUTABLE


def _metadata(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    with _torch.plain_tensors():
        return [*map(operator.attrgetter("shape", "dtype", "device", "requires_grad"), tensors)]
