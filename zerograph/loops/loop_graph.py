"""The graphs of a loop that compute without a batch: updates, and functions that edit gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.dependencies import OF_LOOP
from zerograph.config import Config
from zerograph.eager import dispatch
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.graph import ZeroGraph
from zerograph.ir.mesh import local_part
from zerograph.ir.sbp import PartialSum
from zerograph.loops.global_parts import check_numbers
from zerograph.loops.split_gradients import reduce_sums, reduced
from zerograph.passes.context import GradientUse
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.parameters import parameters_read
from zerograph.runtime.state import Store, load_part, stores_of
from zerograph.runtime.tensor_hash import hash_bits
from zerograph.state.stateful import interruptible
from zerograph.state.threads import one_thread


class LoopGraph(ZeroGraph):
    """A graph of a loop's modules and of some of its optimizers.

    Args:
        modules: the modules, by their name in the graph. The loop may change them.
        optimizers: the optimizers.
        config: the options.

    Attributes:
        gradients: the use of gradients.
    """

    gradients: ClassVar[GradientUse]

    def __init__(
        self, modules: dict[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> None:
        super().__init__()
        self._modules = modules
        vars(self).update(modules)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        self._request = replace(self._request, gradients=self.gradients)
        if self.gradients in ("accumulate", "edit"):
            # Another graph clips their sum.
            config = copy.copy(config)
            config.clip_grad_norm = None
        self.config = config

    def _attributes(self) -> dict[str, Any]:
        # Each call of the graph asks, and it has no others.
        return self._modules

    def _attributes_of_code(self) -> dict[str, Any]:
        return {**self._attributes(), OF_LOOP: self._described()}

    def _described(self) -> str:
        """Return what ``build()`` does, in words that are equal in another process."""
        return "an update"


class Update(LoopGraph):
    """The update of optimizers by the gradients that a loop has computed; without optimizers, their modules only."""

    gradients: ClassVar[GradientUse] = "accumulated"
    # The last update has changed parameters whose memory the loop has in other tensors, on any rank.
    _changed_read = False

    def build(self) -> list[Tensor]:
        """Compute nothing: the gradients are there."""
        return []

    @interruptible("a step")
    def run(self, gradients: Mapping[nn.Parameter, Tensor], split: Sequence[nn.Parameter]) -> Any:
        """Update parameters by their gradients. A collective.

        Args:
            gradients: those that the loop has stored.
            split: the parameters that have split gradients.

        Returns:
            What ``build()`` returns.

        Raises:
            ZeroGraphError: as calling a graph does.
        """
        if gradients:
            # All of a plain one is compared where it is added.
            check_numbers("optimizer.step()", [one for one in gradients.values() if isinstance(one, GlobalTensor)])
        reduce_sums(stores_of(split))
        parameters = dict.fromkeys((*gradients, *split))
        has_gradient = set(map(id, parameters))
        known = self._members().parameters
        accumulated = tuple(itertools.compress(known, map(has_gradient.__contains__, map(id, known.values()))))
        if accumulated != self._request.accumulated:
            self._request = replace(self._request, accumulated=accumulated)
        # Ranks drop tensors at different times.
        is_read = any(id(one) in has_gradient for one in parameters_read())
        # In one number: a comparison has room for eight.
        order, *summands = world().summands()
        self._steps.notes = [2 * order + int(is_read), *summands]
        with one_thread("an update"), torch.autograd.set_detect_anomaly(False):
            step, batch = self._ready((), {})
            self._changed_read = any(first % 2 for first, *_ in self._steps.notes_of_ranks)
            world().learn_losses([[first // 2, *summands] for first, *summands in self._steps.notes_of_ranks])
            sums = {store: store.accumulated for store in stores_of(gradients)}
            try:
                for store in sums:
                    _add_up(store, gradients)
                self._check_replicas()
                result = self._run(step, step.executor, batch)
            finally:
                for store, before in sums.items():
                    store.accumulated = before
        if self.gradients != "edit":
            with _torch.without_torch_function():
                # A result of the parameters as they were cannot be differentiated any more.
                torch.autograd.graph.increment_version(list(parameters))
        return result


class Edit(Update):
    """A function of torch that edits gradients, such as one that clips them, on the sums of the ranks."""

    gradients = "edit"

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        config: Config,
        function: Callable[..., Any],
        names: Sequence[str],
        arguments: Mapping[str, Any],
    ) -> None:
        super().__init__(modules, optimizers, config)
        self._function, self._names, self._arguments = function, names, dict(arguments)

    def build(self) -> Any:
        """Edit the gradients."""
        root = self._members().root
        return self._function([root.get_parameter(name) for name in self._names], **self._arguments)

    def _described(self) -> str:
        return repr((self._function.__name__, self._names, self._arguments))

    def _finish_step(self, step: CompiledStep, values: Sequence[Tensor], skipped: Set[str]) -> None:
        self._passes_done += 1


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
    if now.slices is None and now.job.size > 1:
        own = reduced(layout, flat)
    else:
        # What every rank has is cut, not added: a sum with zeros would lose the sign of a zero.
        part = flat[local_part(flat.shape, layout.gradient_sbp, store.job.mesh)]
        own = (part if part.shape == flat.shape else part.clone()).to(layout.storage_device)
    store.accumulated = own if store.accumulated is None else store.accumulated + own


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
    return whole if job.rank == 0 or world().slices is not None else torch.zeros_like(whole)
