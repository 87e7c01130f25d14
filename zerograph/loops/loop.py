"""The driver of a loop: what the loop says happens when it says it, on global tensors; updates are graphs.

Loaders yield global tensors. A call of a prepared model computes at once, autograd puts global tensors into
``parameter.grad``, and ``optimizer.step()`` runs one graph that updates by them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph import _torch
from zerograph.compiler.virtual_ranks import check_target, slices_per_rank
from zerograph.config import Config
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import leave, use_options, world
from zerograph.errors import ConfigError, InputError
from zerograph.ir.wire import format_of
from zerograph.loops.call_graph import CHANGED_BEFORE_BACKWARD
from zerograph.loops.calls import Calls
from zerograph.loops.global_parts import check_equal, of_batch, of_call, split_rows
from zerograph.loops.loaders import SplitLoader
from zerograph.loops.loop_graph import Edit, Update
from zerograph.loops.split_gradients import SplitGradients
from zerograph.optim.step_hooks import run_hooks_after, run_hooks_before
from zerograph.runtime.backends.backends import resolve
from zerograph.runtime.job.exchange import broadcast_from
from zerograph.runtime.job.process_group import agree, digest, has_no_rank
from zerograph.runtime.parameters import (
    DATA,
    SplitParameter,
    changed_while_split,
    parameters_of,
    store_gradient,
    stored_gradient,
    stored_gradients,
)
from zerograph.runtime.state import (
    Store,
    StoredState,
    holds_state_of,
    replaced_state,
    reshard,
    show_whole,
    stores_of,
    unshard,
)
from zerograph.runtime.tensor_hash import hash_bits
from zerograph.state.whole_values import keep_states

# Graphs of edits, one for each function and its arguments; further ones edit gradients that are read.
_MOST_EDITS = 8


class Loop:
    """Modules and optimizers of a loop whose operators run when they are called.

    Attributes:
        modules: the prepared modules, by their name in the graphs.
        members: these, and the parameters of optimizers that no module has.
        optimizers: the prepared optimizers.
        config: the options of all graphs.
        busy: state dicts are those of the plain modules now.
        schedulers: the prepared schedulers.
        calls: the calls of the modules.
        gradients: the gradients that these have computed.
        is_unsynced: calls leave to each rank what it adds to gradients, where these are whole on all.
        is_scaled: a ``GradScaler`` has unscaled gradients.
        has_loader: a loader is prepared, so a plain tensor is the whole tensor; else it is this rank's rows.
        splits_rows: ranks share the rows of whole tensors that are passed to a module.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> None:
        gathers = format_of(config.precision.wire, "gather", 0)
        whole_steps = {
            "placement": config.mesh.placement is not None,
            f"context_parallel={config.mesh.context_parallel}": config.mesh.context_parallel > 1,
            "input_sbp": config.mesh.input_sbp is not None,
            "batch_norm='local'": config.batch_norm == "local",
            "stage='auto'": config.zero.stage == "auto",
            "error feedback of gathers": config.zero.stage != 0 and gathers is not None and gathers.feedback,
        }
        for name in (name for name, is_used in whole_steps.items() if is_used):
            raise ConfigError(
                f"zg.prepare() with {name}: it is for steps that are one graph\n"
                "A loop runs call by call, on one line of all ranks. Write the step as build() of a zg.ZeroGraph."
            )
        if config.virtual_ranks is not None:
            devices = [one.device for module in modules.values() for one in module.parameters()]
            for device in devices[:1]:
                check_target(config, resolve(config.backend, device)[1], device)
        self._use_slices(config)
        self.modules, self.optimizers, self.config = dict(modules), list(optimizers), config
        self.members = dict(modules)
        self.schedulers: list[LRScheduler] = []
        self.busy, self.has_loader, self.splits_rows, self.is_scaled = False, False, False, False
        self._forward = Update(self.members, (), config)
        self._updates: dict[tuple[int, ...], Update] = {}
        self._edits: dict[Hashable, Edit] = {}
        self.calls, self.gradients, self.is_unsynced = Calls(self), SplitGradients(), False
        self._is_shared = False
        # Stores whose parameters are whole from a call to the next update, with hashes of these.
        self._shown: dict[Store, list[int]] = {}
        self._watched: list[nn.Parameter] = []
        # How often each parameter was split again, by id: as often its version has changed without a change.
        self._hidings: dict[int, int] = {}
        self._copies: list[_Copy] = []
        # States of optimizers that are whole until the next update.
        self._states: list[StoredState] = []

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a prepared module or function.

        Raises:
            RankMismatchError: ranks pass other tensors.
        """
        if self.config.virtual_ranks is not None and world().slices is None:
            # There may be a new process group.
            self._use_slices(self.config)
        if self.config.virtual_ranks != world().slices:
            raise ConfigError(
                f"this loop has config.virtual_ranks = {self.config.virtual_ranks}, and one that was prepared later "
                f"{world().slices}\nPrepare all loops of a process with the same number."
            )
        self._share()
        self._end_copies()
        self._take_states()
        named = type(function) if isinstance(function, nn.Module) else function
        doing = f"a call of {getattr(named, '__name__', type(function).__name__)}"
        if _torch.is_transforming():
            # What torch.func wraps has no values to compare.
            return self.run_eagerly(function, args, kwargs)
        args, kwargs = self.as_global(args, kwargs, doing)
        if isinstance(function, nn.Module):
            return self.calls.run(function, args, kwargs)
        return self.run_eagerly(function, args, kwargs)

    def as_global(self, args: Any, kwargs: Any, doing: str) -> tuple[Any, Any]:
        """Return the arguments of a call, with global tensors in place of this rank's rows."""
        if self.has_loader:
            check_equal((args, kwargs), doing)
            return split_rows((args, kwargs)) if self.splits_rows else (args, kwargs)
        args, found = of_call(args, kwargs, doing)
        if found is not kwargs:
            # Later calls may take what this one returns.
            world().rows_of_ranks, world().joins_rows = True, False
        return args, found

    @property
    def keeps_summands(self) -> bool:
        """Return whether each rank keeps what it adds to the sums of gradients until these are read."""
        if (
            not self.is_unsynced
            or self.config.precision.wire != "exact"
            or world().slices is not None
            or world().is_alone
        ):
            return False
        return not (self.config.policy.split and self.config.policy.reduce_early)

    def _use_slices(self, config: Config) -> None:
        """Have global tensors consist of the slices of ``config.virtual_ranks``.

        Raises:
            ConfigError: the ranks do not divide them.
        """
        if has_no_rank():
            # Ranks are known when a loader or a call asks for them.
            return
        if config.virtual_ranks is not None:
            slices_per_rank(config, world().job.mesh)
        use_options(config)

    def leave_job(self) -> None:
        """Leave a job that has lost ranks: compiled graphs, gradients and the values of sharded state go."""
        self._shown.clear()
        self._copies.clear()
        for state in self._states:
            state.close()
        self._states.clear()
        for parameter in self._watched:
            store_gradient(parameter, None)
        for graph in (self._forward, *self._updates.values()):
            graph._leave_job()
        self._edits.clear()
        self.calls.forget()
        self.gradients = SplitGradients()
        self.gradients.watch(self._watched)
        self._is_shared = False
        leave()

    def run_eagerly(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call on global tensors."""
        if isinstance(function, nn.Module):
            # A function may call modules only, as Lightning's training_step. What it reads itself is made whole then.
            # The module may have parameters that it had not when it was prepared.
            self.watch(function.parameters())
            self._show()
        run = function
        if "_zerograph_prepared" in vars(type(function)):
            run = type(function).__bases__[0].__call__.__get__(function)
        with self._precision(), contextlib.nullcontext() if _torch.is_transforming() else self._saving():
            return run(*args, **kwargs)

    def loader(self, loader: Iterable[Any]) -> SplitLoader:
        """Return a loader of global tensors; one that is prepared already as it is, with its position."""
        self._use_slices(self.config)
        self.has_loader, world().rows_of_ranks = True, False
        if isinstance(loader, GlobalLoader):
            loader._config = self.config
            return loader
        return (GlobalIterator if isinstance(loader, Iterator) else GlobalLoader)(loader, self.config)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Make the update of an optimizer by ``parameter.grad``. A collective.

        Raises:
            ZeroGraphError: on every rank, before any state changes.
        """
        result = None
        run_hooks_before(optimizer)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        # What the loop has changed may make split gradients whole.
        parameters, update = parameters_of(optimizer), self.graph(optimizer)
        gradients, split = stored_gradients(parameters), self.gradients.of(parameters)
        self._end_copies()
        if gradients and any("_zerograph_loop" not in vars(one) for one in parameters):
            # The loop has put others into a group.
            self.adopt(optimizer)
        if gradients or split:
            update.run(gradients, split)
            if update._changed_read:
                # What the loop has kept of ``parameter.data`` has the new values.
                self._show()
        else:
            run_hooks_after(optimizer)
        _torch.mark_step_called(optimizer)
        return result

    def separate(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that share no parameter with an earlier one, for graphs that compute gradients."""
        if len(self.optimizers) == 1:
            # Each call asks.
            return self.optimizers
        found, seen = [], set[int]()
        for optimizer in self.optimizers:
            own = set(map(id, parameters_of(optimizer)))
            if seen.isdisjoint(own):
                found.append(optimizer)
                seen |= own
        return found

    def unscale(self, optimizer: torch.optim.Optimizer, inverse: Tensor) -> bool:
        """Multiply the gradients of an optimizer; return whether they were all finite. A collective."""
        parameters, self.is_scaled = parameters_of(optimizer), True
        whole = stored_gradients(parameters).values()
        is_finite = all(bool(gradient.isfinite().all()) for gradient in whole) & self.gradients.are_finite(parameters)
        for gradient in whole:
            # Not in the gradient's dtype, which would round the number.
            gradient.mul_(inverse.to(gradient.device))
        self.gradients.multiply(parameters, inverse)
        return is_finite

    def edit(
        self, function: Callable[..., Any], parameters: Sequence[nn.Parameter], arguments: Mapping[str, Any]
    ) -> Any:
        """Run a function that edits the gradients of parameters: on split ones as a graph. A collective."""
        split = self.gradients.of(parameters)
        mine = [one for optimizer in self.separate() for one in parameters_of(optimizer)]
        if not split or stored_gradients(parameters) or len(split) < len(self.gradients.of(mine)):
            return function(parameters, **arguments)
        # Torch takes the number of a limit that is a tensor.
        arguments = {name: one.item() if isinstance(one, Tensor) else one for name, one in arguments.items()}
        names = self._forward._members().names
        edited = tuple(names[id(one)] for one in parameters)
        key = function.__name__, edited, tuple((name, repr(value)) for name, value in arguments.items())
        if key not in self._edits and len(self._edits) >= _MOST_EDITS:
            # A limit that differs in each step, for instance.
            return function(parameters, **arguments)
        if key not in self._edits:
            self._edits[key] = Edit(self.members, self.separate(), self.config, function, edited, arguments)
        with self.hidden():
            return self._edits[key].run({}, split)

    def zero_grad_of(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear the gradients of parameters."""
        parameters = list(parameters)
        self.gradients.clear(parameters, set_to_none=set_to_none)
        for parameter, gradient in stored_gradients(parameters).items():
            if set_to_none:
                store_gradient(parameter, None)
            else:
                gradient.detach_().zero_()

    def waits_for_step(self) -> bool:
        """Return whether a parameter has a gradient of a global tensor."""
        return any(
            isinstance(stored_gradient(one), GlobalTensor) or one in self.gradients
            for optimizer in self.optimizers
            for one in parameters_of(optimizer)
        )

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether this parameter has a gradient."""
        return parameter in self.gradients or stored_gradient(parameter) is not None

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the parameters of an optimizer those of the loop, and watch those that are new."""
        parameters = parameters_of(optimizer)
        for parameter in parameters:
            parameter._zerograph_loop = self  # type: ignore[attr-defined]
            parameter._zerograph_opens = self.open_state  # type: ignore[attr-defined]
        self.watch(parameters)
        self.find_loose()

    def find_loose(self) -> None:
        """Make the parameters of optimizers that no module has, as of a layer that was removed, the loop's own."""
        known = {id(one) for module in self.modules.values() for one in module.parameters()}
        trained = {id(one): one for optimizer in self.optimizers for one in parameters_of(optimizer)}
        loose = {key: one for key, one in trained.items() if key not in known}
        before = self.members.pop("loose", None)
        if loose:
            # Graphs look at the modules anew if one is another object.
            is_same = before is not None and [*map(id, before.parameters())] == [*loose]
            self.members["loose"] = before if is_same else nn.ParameterList(loose.values())  # type: ignore[assignment]

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make parameters whole where the loop computes with them. Their gradients are torch's own.

        In their place a module may have global tensors, by ``torch.func.functional_call()``, which stay what they are.
        """
        show = self._show
        parameters = [
            one
            for one in parameters
            if not isinstance(one, GlobalTensor) and getattr(one, "_zerograph_whole", None) != show
        ]
        self._watched += parameters
        for parameter in parameters:
            parameter._zerograph_whole = show  # type: ignore[attr-defined]
        self.gradients.watch(parameters)

    def graph(self, *optimizers: torch.optim.Optimizer) -> Update:
        """Return the graph that updates these optimizers, or without any the one of the modules."""
        self.hide()
        self._end_states()
        if self.calls.settle_buffers():
            self.find_loose()
        if not optimizers:
            return self._forward
        numbers = tuple(sorted(n for n, one in enumerate(self.optimizers) if any(one is other for other in optimizers)))
        if numbers not in self._updates:
            update = Update(self.members, [self.optimizers[n] for n in numbers], self.config)
            update._kinds_of_calls, update._take_calls = self.calls.graphs, self.calls.expect
            self._updates[numbers] = update
        return self._updates[numbers]

    def open_state(self, state: StoredState) -> None:
        """Make the state of an optimizer whole, for the loop to read and change until the next update. A collective."""
        state.open(world().job)
        self._states.append(state)

    def _take_states(self) -> None:
        """Guard the mappings that the loop has assigned to ``optimizer.state``."""
        for optimizer in self.optimizers:
            if not isinstance(optimizer.state, StoredState) and holds_state_of(optimizer):
                self._states = [one for one in self._states if one.optimizer is not optimizer]
                self._states.append(replaced_state(optimizer))

    def _end_states(self) -> None:
        """Store the states that are whole, with the changes that the loop has made. A collective if there are any.

        Raises:
            RankMismatchError: ranks have made other changes.
        """
        self._take_states()
        if self._states:
            states, self._states = self._states, []
            keep_states(world().job, states)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block that computes in the precision of the options."""
        device = next((one.device.type for module in self.modules.values() for one in module.parameters()), "cpu")
        dtype = self.config.precision.amp_dtype
        return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)

    def _share(self) -> None:
        """Give all ranks the parameters and buffers of the first, before the first call. A collective.

        Raises:
            RankMismatchError: ranks have prepared other modules.
        """
        if self._is_shared:
            return
        job = world().job
        members = self._forward._members()
        named = {**members.parameters, **members.buffers}
        own = {name: one.detach() for name, one in named.items() if not isinstance(one, SplitParameter)}
        facts = {"the prepared modules": str([(name, [*one.shape], str(one.dtype)) for name, one in own.items()])}
        hashes = [int(hash_bits(one)) % 2**62 for one in own.values()]
        everybody = agree(job, "the first call of a prepared module", digest(facts), lambda: facts, None, hashes)
        if any(one != everybody[0] for one in everybody):
            broadcast_from(job, list(own.values()))
        self._is_shared = True

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state of parameters and buffers; they get what is written to it before the next call."""
        tensors = {id(one): one for one in state.values() if isinstance(one, Tensor)}
        with torch.inference_mode(False):
            # Their writes are counted. Tied parameters have one copy.
            copies = {key: one.detach().clone() for key, one in tensors.items()}
        self._copies += [_Copy.of(copies[key], one, self._version(one)) for key, one in tensors.items()]
        return type(state)((name, copies.get(id(one), one)) for name, one in state.items())

    def _take_copies(self) -> None:
        """Write to parameters and buffers what the loop has written to their copies in state dicts.

        Raises:
            InputError: it has written to one of them too, and it is unknown in which order.
        """
        if not self._copies:
            return
        # What is written makes a split parameter whole, which takes copies.
        copies, self._copies = self._copies, []
        for place, one in enumerate(copies):
            tensor = one.reference()
            if tensor is None or not one.is_written(tensor):
                continue
            if None not in (now := self._version(one.source), one.source_version) and now != one.source_version:
                self._copies = copies
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed, and so was its copy in a state_dict()"
                    "\nCall state_dict() again after a change, or change one of the two."
                )
            with torch.no_grad():
                one.source.copy_(tensor)
            copies[place] = _Copy.of(tensor, one.source, self._version(one.source))
        self._copies += [one for one in copies if one.reference() is not None]

    def _version(self, tensor: Tensor) -> int | None:
        """Return the number of writes to a parameter or buffer; None for one that inference mode does not count."""
        # A split parameter has no values, but this number.
        with _torch.without_torch_function():
            return None if tensor.is_inference() else _torch.version(tensor) - self._hidings.get(id(tensor), 0)

    def _end_copies(self) -> None:
        self._take_writes()
        self._copies = [one if one.kept is None else replace(one, kept=None) for one in self._copies]

    def _take_writes(self) -> None:
        """Write to parameters what the loop has written to their copies, and to what it has read from them."""
        self._take_copies()
        if changed_while_split(self._watched):
            self._show()

    def _show(self) -> None:
        """Make split parameters whole until the next update. A collective where they are not."""
        self._take_copies()
        # Modules may have other tensors in their place now, by torch.func.functional_call().
        stores = [store for store in stores_of(self._watched) if not store.layout.is_whole and not store.is_unsharded]
        if stores:
            # One rank that reads alone would wait for the others.
            agree(world().job, "reading parameters", 0, dict)
            # They may be whole until the next training call.
            with torch.inference_mode(False), _torch.outside_transforms():
                changed = changed_while_split(self._watched)
                unshard(stores)
                self._shown |= {store: _hashes(store) for store in stores}
                for parameter, value in changed:
                    DATA.__get__(parameter).copy_(value)

    def hide(self) -> None:
        """Split the parameters that :meth:`_show` has made whole, with the changes that the loop has made.

        Raises:
            RankMismatchError: ranks have made other changes.
        """
        self._take_writes()
        for store in self._reshard():
            for parameter in store.parameters:
                self._hidings[id(parameter)] = self._hidings.get(id(parameter), 0) + 1
            with _torch.without_torch_function():
                # What autograd has saved of it, past :meth:`_saving`, has no values any more.
                torch.autograd.graph.increment_version(store.parameters)

    def _reshard(self) -> dict[Store, list[int]]:
        """Split whole parameters; return their stores, with hashes of what was whole. A collective."""
        if not self._shown:
            return {}
        # By value: a change through parameter.data leaves no other trace.
        hashes = {store: _hashes(store) for store in self._shown}
        advice = "(zg.full_parameters(model, modifier_rank=0) gives all ranks those of rank 0)"
        facts = {f"parameters that the loop may have changed {advice}": str([*hashes.values()])}
        agree(world().job, "the end of a change of parameters", digest(facts), lambda: facts)
        before, self._shown = self._shown, {}
        for store, now in hashes.items():
            reshard(store, keep_changes=now != before[store])
        return hashes

    def hidden(self) -> contextlib.AbstractContextManager[None]:
        """Split whole parameters inside the block. After it they have their values again, which autograd may need."""
        return self._hiding() if self._shown else contextlib.nullcontext()

    @contextlib.contextmanager
    def _hiding(self) -> Iterator[None]:
        values = {store: [DATA.__get__(one) for one in store.parameters] for store in self._shown}
        hashes = self._reshard()
        try:
            yield
        finally:
            # A graph that was compiled inside may have other stores.
            same = {store: one for store, one in hashes.items() if stores_of(store.parameters) == [store]}
            for store in same:
                show_whole(store, values[store])
            self._shown |= same
            if len(same) < len(hashes):
                self._show()

    def _saving(self) -> contextlib.AbstractContextManager[None]:
        """Return a block inside which autograd saves parameters by name: backward finds them whole."""

        def pack(tensor: Tensor) -> Any:
            return (tensor, self._version(tensor)) if isinstance(tensor, nn.Parameter) else tensor

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            parameter, before = saved
            if self._version(parameter) != before:
                raise InputError(CHANGED_BEFORE_BACKWARD)
            if isinstance(parameter, SplitParameter):
                self._show()
            result: Tensor = parameter
            return result

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class _Copy:
    """A copy of a parameter or buffer in a state dict, as it was made.

    Attributes:
        reference: the copy, as long as the loop has it.
        kept: the copy until the next call or update; the loop may have written to it and dropped it.
        source: the parameter or buffer.
        version, source_version: the number of writes to each of them.
        bits: the hash of the copy's values, which change without a write that is counted: by ``copy.data.mul_()``.
    """

    reference: weakref.ref[Tensor]
    kept: Tensor | None
    source: Tensor
    version: int
    source_version: int | None
    bits: int

    @staticmethod
    def of(copy: Tensor, source: Tensor, source_version: int | None) -> _Copy:
        return _Copy(weakref.ref(copy), copy, source, _torch.version(copy), source_version, int(hash_bits(copy)))

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether the loop has changed the copy, whose values are compared until the next call or update."""
        is_same = _torch.version(tensor) == self.version
        return not is_same or (self.kept is not None and int(hash_bits(tensor)) != self.bits)


def _hashes(store: Store) -> list[int]:
    return [int(hash_bits(one.detach())) for one in store.parameters]


class GlobalLoader(SplitLoader):
    """Iterate over the batches of a loader as global tensors, of which each rank reads its rows."""

    def __iter__(self) -> Any:
        """Iterate over the batches. After an error of the loader the pass goes on, if the loader's does."""
        count_metrics_once()
        return map(of_batch, super().__iter__())


class GlobalIterator(GlobalLoader):
    """A loader of an iterator, such as a generator: one itself, of which ``next()`` is the next batch."""

    _running: Iterator[Any] | None = None

    def __iter__(self) -> Any:
        """Go on with the batches."""
        self._running = super().__iter__()
        return self._running

    def __next__(self) -> Any:
        return next(self._running or iter(self))


def count_metrics_once() -> None:
    """Let metrics of torchmetrics, if the script has imported it, compute as in one process: ranks have the same state.

    They add their state up over ranks otherwise, as is right where ranks pass rows that they have cut themselves.
    """
    kind: Any = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if kind is None or hasattr(kind.sync, "__wrapped__"):
        return
    original = kind.sync

    @functools.wraps(original)
    def sync(self: Any, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(self, *args, **kwargs)
        if not world().rows_of_ranks:
            call.arguments["distributed_available"] = bool
        original(*call.args, **call.kwargs)

    kind.sync = sync
