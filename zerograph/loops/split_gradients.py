"""Gradients of a loop that graphs have computed: sums that the ranks hold split until the loop reads them.

``parameter.grad`` is torch's own once it was read, whole on every rank. Other gradients stay in the buckets, where
calls add to them and the update reads them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zerograph.eager import dispatch
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.ir.buckets import Bucket
from zerograph.ir.sbp import partial_sum
from zerograph.runtime.job.process_group import agree
from zerograph.runtime.parameters import hold_gradient_by, store_gradient, stored_gradient, stored_gradients
from zerograph.runtime.state import Store, accumulated, accumulated_gradients, load_accumulated, store_of, stores_of


class SplitGradients:
    """The split gradients of a loop, and their holder for ``parameter.grad``."""

    def __init__(self) -> None:
        self._parameters: dict[int, nn.Parameter] = {}
        # Those of the block that is open, whose gradients go to no parameter.
        self._aside: list[nn.Parameter] | None = None

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Answer for the gradients of these parameters."""
        for parameter in parameters:
            hold_gradient_by(parameter, self)

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that a graph has added to the gradients of these parameters."""
        if self._aside is not None:
            self._aside += parameters
            return
        self._parameters.update(zip(map(id, parameters), parameters, strict=True))
        # What the loop has read it may read again by its own name.
        for parameter in stored_gradients(parameters):
            self.settle(parameter)

    @contextlib.contextmanager
    def aside(self, parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Return a block whose gradients are whole in a dictionary at its end, and in no parameter. A collective."""
        sums = {store: (store.accumulated, store.reduce) for store in stores_of(parameters)}
        result = dict[nn.Parameter, Tensor]()
        self._aside = []
        for store in sums:
            _drop(store)
        try:
            yield result
            own = set(map(id, self._aside))
            for store in sums:
                for parameter, gradient in zip(store.parameters, accumulated_gradients(store), strict=True):
                    if id(parameter) in own:
                        result[parameter] = _whole(gradient)
        finally:
            self._aside = None
            for store, before in sums.items():
                store.accumulated, store.reduce = before

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._parameters

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the parameters that have a split gradient."""
        parameters = list(parameters)
        return [*itertools.compress(parameters, map(self._parameters.__contains__, map(id, parameters)))]

    def settle(self, parameter: nn.Parameter) -> None:
        """Make the gradients of a parameter's bucket torch's own. A collective if it has a split one."""
        store = store_of(parameter)
        if parameter not in self or store is None:
            return
        gradients = accumulated_gradients(store)
        with torch.no_grad():
            for other, gradient in zip(store.parameters, gradients, strict=True):
                if self._parameters.pop(id(other), None) is None:
                    continue
                whole, before = _whole(gradient), stored_gradient(other)
                if before is None:
                    store_gradient(other, whole)
                else:
                    before.add_(whole)
        _drop(store)

    def drop(self, parameter: nn.Parameter) -> None:
        """Drop a split gradient, in whose place the loop sets another, or none."""
        self.clear([parameter], set_to_none=True)

    def clear(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear split gradients: to zeros, or altogether."""
        cleared = self.of(parameters)
        own = set(map(id, cleared))
        for store in stores_of(cleared):
            if own.issuperset(map(id, self.of(store.parameters))):
                _drop(store)
            else:
                zeros = [torch.zeros(one.shape) if id(one) in own else None for one in store.parameters]
                load_accumulated(store, zeros)
        if set_to_none:
            for one in cleared:
                del self._parameters[id(one)]

    def are_finite(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the split gradients of parameters are finite on all ranks. A collective."""
        sums = [accumulated(store) for store in stores_of(self.of(parameters)) if store.accumulated is not None]
        own = [int(all(bool(one.isfinite().all()) for one in sums))]
        return all(flag for (flag,) in agree(world().job, "unscaling gradients", 0, dict, None, own))

    def multiply(self, parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
        """Multiply the split gradients of an optimizer's parameters."""
        for store in stores_of(self.of(parameters)):
            if store.accumulated is not None:
                store.accumulated.mul_(factor.to(store.accumulated.device))


def _whole(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    return gradient if world().is_alone else dispatch.wrapped_whole(GlobalTensor, gradient)


def add_gradients(stores: Iterable[tuple[Store, bool]], gradients: Sequence[Tensor]) -> None:
    """Add to the sum of each bucket a gradient, which a graph has joined; the first is the sum. A collective.

    Args:
        stores: the buckets, and whether the gradient is what this rank adds to it.
        gradients: this rank's part of each.
    """
    taken: set[int] = set()
    for (store, is_unreduced), gradient in zip(stores, gradients, strict=True):
        if not is_unreduced:
            reduce_sums([store])
        elif store.accumulated is not None and store.reduce is None:
            gradient = reduced(store.layout, gradient)
        if store.accumulated is not None:
            store.accumulated.add_(gradient)
            continue
        storage = gradient.untyped_storage()
        # Several buckets may have been reduced together, or have equal gradients.
        is_own = storage.nbytes() == gradient.nbytes and storage.data_ptr() not in taken
        taken.add(storage.data_ptr())
        store.accumulated = gradient if is_own else gradient.clone()
        store.reduce = reduced if is_unreduced else None


def reduce_sums(stores: Iterable[Store]) -> None:
    """Reduce sums of which each rank has what it adds. A collective if there are any."""
    for store in stores:
        if store.accumulated is not None:
            accumulated(store)


def reduced(layout: Bucket, summand: Tensor) -> Tensor:
    """Return this rank's part of the sum of what the ranks have, where it is stored. A collective."""
    now = world()
    held = (partial_sum,) * now.job.mesh.dims
    spec = now.spec(tuple(summand.shape), summand.stride(), summand.dtype, summand.device, held)
    part: Tensor = dispatch.boxed(GlobalTensor, GlobalTensor(summand, spec), layout.gradient_sbp).local
    return part.to(layout.storage_device)


def _drop(store: Store) -> None:
    store.accumulated = store.reduce = None
