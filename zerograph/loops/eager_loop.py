"""The driver of an eager loop: what the loop says happens when it says it, on global tensors; updates are graphs.

Loaders yield global tensors. A call of a prepared model computes at once, autograd puts global tensors into
``parameter.grad``, and ``optimizer.step()`` runs one graph that updates by them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.config import Config
from zerograph.eager import dispatch
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import ConfigError
from zerograph.graph import ZeroGraph
from zerograph.ir.sbp import PartialSum, partial_sum
from zerograph.loops.global_parts import check_equal, of_parts
from zerograph.loops.loaders import SplitLoader
from zerograph.runtime.job.exchange import broadcast_from_first
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.parameters import SplitParameter, parameters_of, store_gradient, stored_gradient
from zerograph.runtime.state import Store, load_part, reshard, stores_of, unshard
from zerograph.runtime.tensor_hash import hash_bits


class Update(ZeroGraph):
    """The update of optimizers by the gradients that a loop has computed; without optimizers, their modules only."""

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        self.config = config
        self._request = replace(self._request, gradients="accumulated")

    def build(self) -> list[Tensor]:
        """Compute nothing: the gradients are there."""
        return []

    def run(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Update parameters by their gradients. A collective.

        Raises:
            ZeroGraphError: as calling a graph does.
        """
        names = self._members().names()
        self._request = replace(self._request, accumulated=tuple(names[id(one)] for one in gradients))
        self.compile()
        stores = stores_of(gradients)
        try:
            for store in stores:
                _add_up(store, gradients)
            self()
        finally:
            for store in stores:
                store.accumulated = None
        with _torch.without_torch_function():
            # A result of the parameters as they were cannot be differentiated any more.
            torch.autograd.graph.increment_version(list(gradients))


class EagerLoop:
    """Modules and optimizers of a loop whose operators run when they are called.

    Attributes:
        modules: the prepared modules, by their name in the graphs.
        optimizers: the prepared optimizers.
        config: the options of all graphs.
        busy: state dicts are those of the plain modules now.
        has_loader: a loader is prepared, so a plain tensor is the whole tensor; else it is this rank's rows.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> None:
        if config.placement is not None:
            raise ConfigError("config.loop='eager' with config.placement: eager loops run on one line of ranks")
        self.modules, self.optimizers, self.config = dict(modules), list(optimizers), config
        self.busy, self.has_loader = False, False
        self._forward = Update(modules, (), config)
        self._updates: dict[tuple[int, ...], Update] = {}
        self._is_shared = False
        # Stores whose parameters are whole from a call to the next update.
        self._shown: list[Store] = []

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a prepared module or function.

        Raises:
            RankMismatchError: ranks pass other tensors.
        """
        self._share()
        doing = f"a call of {getattr(function, '__name__', type(function).__name__)}"
        if self.has_loader:
            check_equal((args, kwargs), doing)
        else:
            world().rows_of_ranks = True
            args, kwargs = of_parts((args, kwargs), doing)
        self._show()
        run = function
        if isinstance(function, nn.Module):
            run = type(function).__bases__[0].__call__.__get__(function)
        with self._precision():
            return run(*args, **kwargs)

    def loader(self, loader: Iterable[Any]) -> SplitLoader:
        """Return a loader of global tensors."""
        self.has_loader = True
        return GlobalLoader(loader, self.config)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Make the update of an optimizer by ``parameter.grad``. A collective.

        Raises:
            ZeroGraphError: on every rank, before any state changes.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if gradients := _gradients_of(parameters_of(optimizer)):
            self.graph(optimizer).run(gradients)
        _torch.mark_step_called(optimizer)
        return result

    def unscale(self, optimizer: torch.optim.Optimizer, inverse: Tensor) -> None:
        """Multiply the gradients of an optimizer, which ``GradScaler`` leaves scaled."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.dtype))

    def zero_grad(self, numbers: Iterable[int], *, set_to_none: bool = True) -> None:
        """Clear the gradients of optimizers."""
        for number in numbers:
            _clear(parameters_of(self.optimizers[number]), set_to_none=set_to_none)

    def zero_grad_of(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear the gradients of parameters."""
        _clear(parameters, set_to_none=set_to_none)

    def waits_for_step(self) -> bool:
        """Return whether a parameter has a gradient of a global tensor."""
        return any(
            isinstance(stored_gradient(one), GlobalTensor)
            for optimizer in self.optimizers
            for one in parameters_of(optimizer)
        )

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make parameters whole where the loop computes with them. Their gradients are torch's own."""
        for parameter in parameters:
            parameter.make_whole = self._show  # type: ignore[attr-defined]

    def graph(self, *optimizers: torch.optim.Optimizer) -> Update:
        """Return the graph that updates these optimizers, or without any the one of the modules."""
        self._hide()
        if not optimizers:
            return self._forward
        numbers = tuple(sorted(n for n, one in enumerate(self.optimizers) if any(one is other for other in optimizers)))
        if numbers not in self._updates:
            self._updates[numbers] = Update(self.modules, [self.optimizers[n] for n in numbers], self.config)
        return self._updates[numbers]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block that computes in the precision of the options."""
        device = next((one.device.type for module in self.modules.values() for one in module.parameters()), "cpu")
        dtype = self.config.amp_dtype
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
            broadcast_from_first(job, list(own.values()))
        self._is_shared = True

    def _show(self) -> None:
        """Make split parameters whole until the next update. A collective where they are not."""
        parameters = [one for module in self.modules.values() for one in module.parameters()]
        stores = [store for store in stores_of(parameters) if not store.layout.is_whole and not store.is_unsharded]
        if stores:
            unshard(stores)
            self._shown += stores

    def _hide(self) -> None:
        """Split the parameters that :meth:`_show` has made whole, with the changes that the loop has made.

        Raises:
            RankMismatchError: ranks have made other changes.
        """
        if not self._shown:
            return
        # By value: a change through parameter.data leaves no other trace.
        values = [one.detach() for store in self._shown for one in store.parameters]
        facts = {"parameters that the loop may have changed": str([int(hash_bits(one)) for one in values])}
        agree(world().job, "the end of a change of parameters", digest(facts), lambda: facts)
        stores, self._shown = self._shown, []
        for store in stores:
            reshard(store, keep_changes=True)


class GlobalLoader(SplitLoader):
    """Iterate over the batches of a loader as global tensors, of which each rank reads its rows."""

    takes_objects = True

    def __iter__(self) -> Any:
        """Iterate over the batches. After an error of the loader the pass goes on, if the loader's does."""
        return map(_as_global, super().__iter__())


def _as_global(batch: Any) -> Any:
    return of_parts(batch, "a batch of a prepared loader")


def _clear(parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
    for parameter in parameters:
        gradient = stored_gradient(parameter)
        if gradient is not None and set_to_none:
            store_gradient(parameter, None)
        elif gradient is not None:
            gradient.detach_().zero_()


def _gradients_of(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    return {one: gradient for one in parameters if (gradient := stored_gradient(one)) is not None}


def _add_up(store: Store, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Reduce the gradients of a bucket to this rank's part of them.

    Raises:
        RankMismatchError: a plain gradient differs between ranks: it was computed without global tensors.
    """
    layout, now = store.layout, world()
    values = [gradients.get(parameter) for parameter in store.parameters]
    parts = [None if value is None else _summand(value) for value in values]
    flat = torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    load_part(store.job, replace(layout, sbp=now.whole), flat, parts)
    partial = (partial_sum,) * now.job.mesh.dims
    spec = now.spec(tuple(flat.shape), flat.stride(), flat.dtype, flat.device, partial)
    whole = dispatch.boxed(GlobalTensor, GlobalTensor(flat, spec), layout.gradient_sbp)
    store.accumulated = whole.local.to(layout.storage_device)


def _summand(gradient: Tensor) -> Tensor:
    """Return this rank's summand of a gradient."""
    job = world().job
    if isinstance(gradient, GlobalTensor):
        if all(isinstance(one, PartialSum) for one in gradient.spec.sbp):
            return gradient.local
        whole = dispatch.whole_of(gradient)
    else:
        whole = gradient.detach().to_dense()
        if job.size > 1:
            facts = {"a gradient that was computed without global tensors": f"{int(hash_bits(whole)):x}"}
            agree(job, "optimizer.step()", digest(facts), lambda: facts)
    return whole if job.rank == 0 else torch.zeros_like(whole)
