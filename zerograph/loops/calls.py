"""Calls of a prepared module as graphs: forward runs at the call, backward when autograd comes to it.

A call of a kind that is new runs on global tensors, and shows which results the loop differentiates. From then on a
call is a step graph that pauses between forward and backward. Its gradients of parameters stay split sums
(:mod:`.split_gradients`). What no graph can do runs on global tensors as before.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base.dictionaries import Dictionaries
from zerograph.compiler.members import SharedMemoryError
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import CaptureError, CommunicationError, RankMismatchError, ReplicaError
from zerograph.loops.call_graph import Begun, CallGraph, Kind, Loop, is_rows
from zerograph.loops.containers import PLAIN
from zerograph.runtime.parameters import parameters_of

# The kinds of calls of one module that become graphs; others of a module that is called in more ways run eagerly.
_MOST_KINDS = 16
# Hooks of zerograph's own that a graph may have inside.
PURE_HOOKS: set[Callable[..., Any]] = set()


class Calls:
    """The calls of a loop's modules.

    Attributes:
        latest: the graph of the last training call of each module.
    """

    def __init__(self, owner: Loop) -> None:
        self._owner = owner
        self.latest: dict[nn.Module, CallGraph] = {}
        self._kinds: dict[Hashable, Kind] = {}
        # What a checkpoint says of kinds: their number of results, and those that the loop differentiates.
        self._expected: dict[str, tuple[int, frozenset[int]]] = {}
        self._trees = {id(module): _Tree(name, module, owner.find_loose) for name, module in owner.modules.items()}

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call of a prepared module.

        Args:
            module: the module.
            args, kwargs: the arguments, with global tensors, or plain ones that are equal on all ranks.
        """
        key: list[Hashable] = []
        tensors: list[Tensor] = []
        with_gradient, tree = torch.is_grad_enabled(), self._trees[id(module)]
        can_be_graph = tree.is_plain() and _is_plain_here() and _described((args, kwargs), key, tensors)
        if not can_be_graph or (with_gradient and not self._can_accumulate(tree)):
            return self._owner.run_eagerly(module, args, kwargs)
        autocast = _torch.ambient_autocast()
        known = (tree.name, *key, tree.flags(), with_gradient, autocast)
        kind = self._kinds.get(known)
        if kind is None:
            results, used = self._expected.get(repr(known), (None, None if with_gradient else frozenset()))
            kind = Kind(results, used=used, is_eager=len(self._kinds) >= _MOST_KINDS)
            if not kind.is_eager:
                self._kinds[known] = kind
        if not kind.is_eager and kind.results is not None and kind.used is not None:
            if kind.graph is None:
                optimizers = self._owner.separate() if with_gradient else ()
                kind.graph = CallGraph(self._owner, optimizers, tree.name, kind, (args, kwargs), tensors, autocast)
            with self._owner.hidden():
                begun = self._ready(kind, module, tensors, tree.parameters)
                if begun is not None:
                    if begun.graph._optimizers:
                        self.latest[module] = begun.graph
                    return begun.run()
        with contextlib.nullcontext() if kind.draws is None else kind.draws.of_a_call():
            result = self._owner.run_eagerly(module, args, kwargs)
        if kind.draws is not None and kind.draws.draws.seed is None:
            kind.draws = None
        return result if kind.is_eager else kind.watched(result, tensors, [*module.buffers()])

    def settle_buffers(self) -> bool:
        """Make buffers whole that a call, or the loop, has replaced by global tensors. A collective.

        Returns:
            Whether a module has other parameters, buffers or submodules than when it was prepared.
        """
        changed = [tree.settle_buffers() for tree in self._trees.values()]
        return any(changed)

    def graphs(self) -> list[tuple[str, int, list[int]]]:
        """Return the kinds of calls that are graphs: what they are, the number of results, and those differentiated."""
        found = []
        for known, kind in self._kinds.items():
            used = kind.used if kind.graph is None else kind.graph.used
            if not kind.is_eager and kind.results is not None and used is not None:
                found.append((repr(known), kind.results, sorted(used)))
        return found

    def expect(self, calls: Sequence[tuple[str, int, list[int]]]) -> None:
        """Run calls of these kinds as graphs from the first one on, so that a resumed loop draws the same numbers."""
        self._expected = {known: (results, frozenset(used)) for known, results, used in calls}

    def forget(self) -> None:
        """Drop all graphs, whose ranks are gone."""
        self.latest.clear()
        self._kinds.clear()
        self._expected = {}

    def _ready(
        self, kind: Kind, module: nn.Module, tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> Begun | None:
        """Return a call that is ready to run; None if no graph can run it."""
        assert kind.graph is not None
        try:
            if kind.graph._steps.are_recompiled:
                raise CaptureError("what they depend on changes in each call")
            return kind.graph.ready(tensors, parameters)
        except (CommunicationError, RankMismatchError, ReplicaError, SharedMemoryError):
            raise
        except Exception as error:
            if world().slices is not None and not isinstance(error, CaptureError):
                # On another number of ranks it may be a graph, whose numbers are others than the operators'.
                raise
            kind.is_eager, kind.graph = True, None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            world().warn(f"calls of {type(module).__name__} run operator by operator, which is slower: {reason}")
            return None

    def _can_accumulate(self, tree: _Tree) -> bool:
        """Return whether an optimizer trains every parameter of a module that gets a gradient, and no hook sees it."""
        parameters = _torch.trained(tree.parameters)
        trained = {*map(id, itertools.chain.from_iterable(map(parameters_of, self._owner.separate())))}
        return (
            bool(parameters) and trained.issuperset(map(id, parameters)) and not _torch.has_gradient_hooks(parameters)
        )


class _Tree:
    """A prepared module with its submodules, as they were when it was prepared.

    Args:
        changed: called before each call of a module that holds other objects than at the last look.

    Attributes:
        name: of the module in the graphs.
        parameters: those of the module.
    """

    def __init__(self, name: str, module: nn.Module, changed: Callable[[], None]) -> None:
        self.name, self._module, self._tensors, self._changed = name, module, _tensors_of(module), changed
        self._look()

    def is_plain(self) -> bool:
        """Return whether a graph sees what a call would: no hooks, and the same parameters and buffers."""
        if not self._tables.are_same():
            self._changed()
            if _tensors_of(self._module) != self._tensors:
                return False
            self._look()
        return not self._has_hooks

    def settle_buffers(self) -> bool:
        """Replace buffers that are global tensors by whole ones; return whether the module's tables have changed."""
        if self._tables.are_same():
            return False
        for module in self._module.modules():
            for name, one in module._buffers.items():
                if isinstance(one, GlobalTensor) and not one.requires_grad:
                    module._buffers[name] = one.full_tensor()
        return True

    def flags(self) -> tuple[bool, ...]:
        """Return which modules are in training mode."""
        return tuple([one.training for one in self._modules])

    def _look(self) -> None:
        self._modules, self.parameters = list(self._module.modules()), list(self._module.parameters())
        hooks = [table for one in self._modules for table in _torch.hook_tables(one)]
        self._has_hooks = any(not any(hook is one for one in PURE_HOOKS) for table in hooks for hook in table.values())
        members = [table for one in self._modules for table in (one._modules, one._parameters, one._buffers)]
        self._tables = Dictionaries([*members, *hooks])


def _tensors_of(module: nn.Module) -> list[tuple[str, int]]:
    """Return what tells the parameters and buffers of a module from others in their place, or the same in another."""
    return [(name, id(one)) for name, one in itertools.chain(module.named_parameters(), module.named_buffers())]


def _is_plain_here() -> bool:
    """Return whether no mode or hook of all modules around a call changes what its operators do."""
    modes = _torch.active_modes() or _torch.is_transforming() or _torch.caches_parametrizations()
    return not (modes or torch.is_anomaly_enabled() or _torch.global_hooks())


def _described(value: Any, key: list[Hashable], tensors: list[Tensor]) -> bool:
    """Note the kind of each part of an argument; return False if a graph cannot take one of them."""
    kind = type(value)
    if kind in (tuple, list):
        key.append((kind, len(value)))
        return all(_described(one, key, tensors) for one in value)
    if kind is dict:
        key.append((kind, *value))
        return all(isinstance(name, str) for name in value) and all(
            _described(one, key, tensors) for one in value.values()
        )
    if isinstance(value, PLAIN):
        key.append((kind, repr(value)))
        return True
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.layout is not torch.strided:
        return False
    is_part, is_ragged = world().is_alone, False
    if isinstance(value, GlobalTensor):
        is_part, is_ragged = is_rows(value.spec.sbp), value.spec.rows is not None
    elif type(value) is not Tensor:
        return False
    # The same tensor twice is one input.
    known = next((place for place, one in enumerate(tensors) if one is value), None)
    if known is None:
        tensors.append(value)
    key.append((value.dim(), value.dtype, value.device, value.requires_grad, is_part, is_ragged, known))
    return True
