"""The key of a step: all that selects it besides sizes, and the snapshot by which equal calls in a row share one key.

The snapshot compares object by object and allocates next to nothing. Collecting the facts of a key takes longer than
running a small step. Any difference leads back to those facts, which decide.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Mapping
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
_METADATA = operator.attrgetter("shape", "dtype", "device", "requires_grad")
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
        self._parameters: list[nn.Parameter] = [*tree.members.parameters.values()]
        self.key, self.stores, self._tree = key, stores_of(self._parameters), tree
        self._tensors: list[Tensor] = [*self._parameters, *tree.members.buffers.values()]
        hooks = [table for optimizer in call.optimizers for table in _torch.step_pre_hook_tables(optimizer)]
        # A parameter's own attributes are its annotation and its store.
        self._dictionaries = Dictionaries([*map(vars, call.config.parts()), *map(vars, self._parameters), *hooks])
        self._objects, self._values = _objects(call), self._read_values(call)
        leaves: list[Any] = []
        self._nesting = collect_leaves(call.arguments, leaves)
        # Without its tensors, which live no longer than their step.
        self._batch = batch.with_tensors(())
        # Sizes of the parts of a batch may differ in each call.
        self._inputs = [
            (tensor.dim() if is_part else tensor.shape, tensor.dtype, tensor.device, marks)
            for tensor, is_part, marks in zip(batch.tensors, batch.parts, batch.marks, strict=True)
        ]
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def match(self, call: Call) -> Batch | None:
        """Return the call's arguments as a batch of the step, or None if anything differs from the snapshot."""
        objects = _objects(call)
        unchanged = (
            len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and self._dictionaries.are_same()
            and self._tree.is_same_below()
            and not _torch.has_gradient_hooks(self._parameters)
            and self._read_values(call) == self._values
        )
        return self._read(call.arguments) if unchanged else None

    def _read_values(self, call: Call) -> tuple[Any, ...]:
        """Return what must be equal besides."""
        with _torch.plain_tensors():
            metadata = [*map(_METADATA, self._tensors)]
        fresh = [store.fresh for store in self.stores]
        return call.request, list(call.attributes), metadata, fresh, call.of_optimizers(), _torch.autocast_dtypes()

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
    groups = [group for optimizer in call.optimizers for group in optimizer.param_groups]
    if (
        batch.mesh is not None
        or batch.passed
        or _torch.has_gradient_hooks(tree.members.parameters.values())
        or not all(map(_is_immutable, itertools.chain.from_iterable(map(_hyperparameters, groups))))
    ):
        return None
    return Snapshot(call, tree, batch, key)


def _objects(call: Call) -> list[Any]:
    """Return the objects that a call depends on, each in its place."""
    # Among the modes is that of the default device.
    flags = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    objects = [call.job, call.config, *flags, *_torch.function_modes(), *call.attributes.values()]
    for optimizer in call.optimizers:
        objects += [optimizer, type(optimizer)]
        for group in optimizer.param_groups:
            # A rate may be None.
            objects += [group, group.get("lr") is None, *group["params"], *group, *_hyperparameters(group)]
    return objects


def _hyperparameters(group: Mapping[str, Any]) -> list[Any]:
    return [value for name, value in group.items() if name not in _NOT_COMPARED]


def _is_immutable(value: Any) -> bool:
    return all(map(_is_immutable, value)) if type(value) is tuple else type(value) in _IMMUTABLE
