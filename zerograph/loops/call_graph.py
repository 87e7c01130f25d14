"""The graph of a kind of calls: forward runs at the call, backward when autograd comes to it.

It is a step graph that pauses between the two. A call that the loop differentiates in another way runs once more.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.step_key import StepKey
from zerograph.eager import dispatch
from zerograph.eager.program import Slot
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import CaptureError, InputError, PlacementError
from zerograph.inspection.trace import Trace
from zerograph.ir.alias import readers
from zerograph.ir.buckets import from_whole_vector
from zerograph.ir.mesh import of_own_slices
from zerograph.ir.metadata import meta
from zerograph.ir.pause import GRADIENT_OF, pause_of
from zerograph.ir.sbp import NdSbp, Split
from zerograph.ir.step_graph import placeholders, writes
from zerograph.loops.containers import (
    Index,
    Template,
    filled,
    found_in,
    map_tensors,
    opaque_in,
    part_at,
    parts_of,
)
from zerograph.loops.counted_draws import CountedDraws
from zerograph.loops.global_parts import check_numbers
from zerograph.loops.loop_graph import LoopGraph
from zerograph.loops.split_gradients import add_gradients
from zerograph.passes.context import GradientUse
from zerograph.runtime.job.process_group import agree
from zerograph.runtime.state import Store, stores_of
from zerograph.state.threads import one_thread

CHANGED_BEFORE_BACKWARD = (
    "a parameter was changed between the call of the model and backward(), which needs it as it was\n"
    "Call the model again, or change parameters after backward()."
)
# The class in :mod:`.loop`, which imports this module: the loop whose calls these are.
Loop = Any
# The result of the last trace. No part of the state that a trace can change.
_TEMPLATE: ContextVar[Template | None] = ContextVar("template", default=None)


def _tie(result: Tensor, origin: Callable[[], Tensor]) -> Tensor:
    """Return a result whose gradient is that of the tensor others have been computed from, as in plain PyTorch."""
    reference = weakref.ref(result)

    def register_hook(hook: Callable[[Tensor], Any]) -> Any:
        return origin().register_hook(hook)

    def retain_grad() -> None:
        tensor = origin()
        if not tensor.retains_grad:
            tensor.retain_grad()
            node, source = tensor.grad_fn, weakref.ref(tensor)
            assert node is not None
            node.register_prehook(lambda _: _copy_gradient(source(), reference()))

    vars(result).update({ORIGIN: origin, "register_hook": register_hook, "retain_grad": retain_grad})
    return result


def _copy_gradient(source: Tensor | None, target: Tensor | None) -> None:
    if source is not None and target is not None:
        target.grad = source.grad


ORIGIN = "_zerograph_origin"


@dataclass(eq=False)
class Kind:
    """A kind of calls: of one module, with tensors of the same kinds in the same places.

    Attributes:
        results: the number of tensors in the result; None before the first call.
        template: the result; None before the first call in this process.
        used: the results that the loop has differentiated; None: it is not known yet.
        graph: runs the calls; None as long as they run eagerly.
        is_eager: the calls always run eagerly.
        draws: the random numbers of eager calls; None if they draw none.
    """

    results: int | None = None
    template: Template | None = None
    used: frozenset[int] | None = None
    graph: CallGraph | None = None
    is_eager: bool = False
    draws: CountedDraws | None = field(default_factory=CountedDraws)

    def watched(self, result: Any, arguments: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
        """Return a result that notes which of its tensors the loop differentiates, and how.

        The other arguments are those of :meth:`Template.of`.
        """
        self.template = Template.of(result, arguments, buffers)
        self.results = len(self.template.differentiable)
        # The loop may read a parameter that a call returns after the next update.
        self.is_eager |= any(isinstance(one, nn.Parameter) for one in found_in(result, Tensor))
        places = itertools.count()
        runs: dict[int, int] = {}

        def note(place: int) -> None:
            runs[place] = runs.get(place, 0) + 1
            # A graph returns the whole in place of a part of it.
            self.used = (self.used or frozenset()) | {wholes[place]}
            self.is_eager |= torch.is_grad_enabled() or runs[place] > 1 or not _torch.reaches_all_leaves()

        def view(tensor: Tensor) -> Tensor:
            place = next(places)
            if not tensor.requires_grad or tensor.is_leaf or place in given:
                return tensor
            # The model may differentiate through its own results too, which tells nothing.
            seen = tensor.view_as(tensor)
            seen.register_hook(lambda _: note(place))
            return _tie(seen, lambda: self._origin(tensor)) if place in inner else seen

        inner, given = self.template.inner, self.template.given
        found = found_in(result, Tensor)
        numbers = {id(one): place for place, one in enumerate(found)}
        wholes = {place: numbers.get(id(one._base), place) for place, one in enumerate(found)}
        views: dict[int, Tensor] = {}
        return map_tensors(result, lambda one: views.setdefault(id(one), view(one)))

    def _origin(self, tensor: Tensor) -> Tensor:
        self.is_eager = True
        return tensor


def _contents(arguments: Any) -> Any:
    """Return what tells arguments from those that a call has changed."""
    leaves, structure = pytree.tree_flatten(arguments)
    return structure, [(id(one), _torch.version(one)) if isinstance(one, Tensor) else one for one in leaves]


class Known(NamedTuple):
    """The calls that a captured graph runs, as far as they are known.

    Attributes:
        captured: the graph.
        template: the result.
        written: the buffers that it changes. True: a statistic of batch norm.
        read: the other buffers that backward reads.
        parts: those of :func:`parts_of`.
    """

    captured: object
    template: Template
    written: dict[str, bool]
    read: Sequence[str]
    parts: dict[int, tuple[int, Index]]


class CallGraph(LoopGraph):
    """The calls of one kind: forward, and with optimizers a pause and backward from the gradients of the results."""

    gradients = "accumulate"

    def __init__(
        self,
        owner: Loop,
        optimizers: Sequence[torch.optim.Optimizer],
        name: str,
        kind: Kind,
        arguments: Any,
        tensors: Sequence[Tensor],
        autocast: Any,
    ) -> None:
        super().__init__(owner.members, optimizers, owner.config)
        self._owner, self._kind, self._name, self._autocast = owner, kind, name, autocast
        places = {id(one): place for place, one in enumerate(tensors)}
        self._arguments = map_tensors(arguments, lambda one: Slot(places[id(one)]))
        self._differentiable = [one.requires_grad and bool(optimizers) for one in tensors]
        assert kind.results is not None
        self._results = kind.results
        # By identity of the captured graph.
        self._known: dict[int, Known] = {}
        early, used = (self._results, kind.used) if optimizers else (0, None)
        # A prepared loader knows what a part is.
        compares = world().rows_of_ranks
        self._request = replace(
            self._request, early_outputs=early, pure=True, differentiated=used, compares_inputs=compares
        )

    def build(self, *tensors: Tensor) -> Any:
        """Call the module; run backward from the gradients of all results."""
        given = [
            one.detach().requires_grad_() if wanted else one
            for one, wanted in zip(tensors, self._differentiable, strict=True)
        ]
        args, kwargs = arguments = filled(self._arguments, given)
        before = _contents(arguments)
        with contextlib.nullcontext() if self._autocast is None else torch.autocast(*self._autocast):
            result = getattr(self, self._name)(*args, **kwargs)
        if _contents(arguments) != before:
            raise CaptureError("a call changes its arguments, which the loop may read")
        results = found_in(result, Tensor)
        if len(results) != self._results:
            raise CaptureError("a call returns another number of tensors than before")
        symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
        sizes = itertools.chain(*found_in(result, torch.Size))
        if found_in(result, symbolic) or any(isinstance(size, symbolic) for size in sizes):
            raise CaptureError("a call returns a number that depends on the sizes of its inputs")
        if opaque := opaque_in(result):
            kind = type(opaque[0]).__name__
            raise CaptureError(f"a call returns a value of type {kind}, which may hold what the call has computed")
        template = Template.of(result, given, [*self.module.buffers()])
        _TEMPLATE.set(template)
        members = itertools.chain(given, self.module.parameters(), self.module.buffers())
        kept = {_torch.storage_key(one.untyped_storage()) for one in members}
        if any(
            place not in template.given and _torch.storage_key(one.untyped_storage()) in kept
            for place, one in enumerate(results)
        ):
            raise CaptureError("a call returns a view of an argument, a parameter or a buffer")
        parts = parts_of(results)
        results = [results[parts[place][0]] if place in parts else one for place, one in enumerate(results)]
        if not self._optimizers:
            return results, repr(parts)
        roots = {place: one for place, one in enumerate(results) if one.requires_grad}
        torch.autograd.backward([*roots.values()], [GRADIENT_OF(root.detach(), place) for place, root in roots.items()])
        gradients = [one.grad for one, wanted in zip(given, self._differentiable, strict=True) if wanted]
        return results, gradients, repr(parts)

    def ready(self, tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Begun:
        """Return a call that all ranks are ready to run; compile its graph if there is none. A collective.

        Raises:
            CaptureError: the call cannot be a graph.
            ZeroGraphError: as calling a graph does.
        """
        _TEMPLATE.set(None)
        unreduced = self._owner.keeps_summands or any(store.reduce is not None for store in stores_of(parameters))
        gradients: GradientUse = "unreduced" if unreduced else "accumulate"
        if self._request.gradients != gradients:
            self._request = replace(self._request, gradients=gradients)
        # A step of the cache is not traced, which would tell the result.
        self._steps.may_be_cached = self._kind.template is not None
        with one_thread("a call of a prepared module"):
            step, batch = self._ready(tuple(map(_input, tensors)), {})
        if id(step.captured) not in self._known:
            template = self._kind.template = _TEMPLATE.get() or self._kind.template
            assert template is not None
            self._keep(step, template)
        last = self._steps.last
        assert last is not None
        return Begun(self, self._checked(step), batch, list(tensors), last.key, self.used, parameters)

    def variant(self, begun: Begun, used: frozenset[int]) -> Begun:
        """Return a call that has begun for a backward from other results. A collective.

        Raises:
            InputError: it must be traced anew, and what it reads has changed.
        """
        request = replace(begun.key.request, differentiated=used)
        with one_thread("a call of a prepared module"):
            step = self._steps.variant(world().job, begun.key, begun.batch, request, self._doing())
        self._keep(step, self.known(begun.step).template)
        return replace(begun, step=self._checked(step), used=used)

    @property
    def used(self) -> frozenset[int]:
        """The results that later calls are prepared to be differentiated from."""
        return self._request.differentiated or frozenset()

    def predict(self, used: frozenset[int]) -> None:
        """Have later calls prepare for a backward from these results."""
        self._request = replace(self._request, differentiated=used)

    def profile(self, steps: int, *args: Any, path: str | os.PathLike[str], **kwargs: Any) -> Trace:
        """Run calls of the module and their backward under ``torch.profiler``, as :meth:`ZeroGraph.profile`.

        Backward starts from zeros, and no gradient is kept.
        """
        given = found_in(self._owner.as_global(args, kwargs, "profile()"), Tensor)
        with self._owner.hidden():
            # The same tensor twice is one input.
            return super().profile(steps, *map(_input, {id(one): one for one in given}.values()), path=path)

    def _finish(self, step: CompiledStep, batch: Batch, inputs: tuple[Any, ...], values: list[Tensor]) -> Any:
        # A profile's gradients, which come last, are for no sum.
        return super()._finish(step, batch, inputs, values[: len(values) - len(step.summed)])

    def _checked(self, step: CompiledStep) -> CompiledStep:
        if self._optimizers and not step.executor.can_pause:
            # With virtual ranks it depends on the number of ranks whether there is a loop.
            kind = CaptureError if world().slices is None else PlacementError
            raise kind("its graph cannot pause between forward and backward, as with offloaded parameters")
        if step.captured.regions:
            raise CaptureError("a zg.local() region computes with the whole batch in a loop, as in one process")
        return step

    def written(self, step: CompiledStep) -> dict[Tensor, bool]:
        """Return the buffers that the calls change, and which of them are statistics of batch norm."""
        names = self.known(step).written
        buffers = self._members().buffers if names else {}
        return {buffers[name]: is_statistic for name, is_statistic in names.items()}

    def known(self, step: CompiledStep) -> Known:
        """Return what is known of the calls that a step runs."""
        return self._known[id(step.captured)]

    def _keep(self, step: CompiledStep, template: Template) -> None:
        roles = [target.meta["role"] for _, target, _ in writes(step.captured.graph.graph)]
        names, root = [role.name.rpartition(".") for role in roles if role.kind == "buffer"], self._members().root
        written = {
            ".".join((path, name)): _torch.is_norm_statistic(root.get_submodule(path), name) for path, _, name in names
        }
        graph, parts = step.executor.graph.graph, ast.literal_eval(step.captured.returned[-1])
        pause, read = pause_of(graph), list[str]()
        for node in placeholders(graph, "buffer"):
            if pause is not None and any(pause < reader for reader in readers(node)):
                read.append(meta(node)["role"].name)
        self._known[id(step.captured)] = Known(step.captured, template, written, read, parts)

    @property
    def module(self) -> nn.Module:
        """The module that is called."""
        return self._modules[self._name]

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return the arguments of a call, with these tensors."""
        return filled(self._arguments, tensors)

    def result(self, step: CompiledStep, results: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Return the result of a call, with these tensors; with the arguments and buffers among them themselves."""
        known = self.known(step)
        template = known.template
        given = {place: filled(one, tensors) for place, one in template.given.items()}
        parts = {place: part_at(results[whole], index) for place, (whole, index) in known.parts.items()}
        return filled(template.result, [given.get(place, parts.get(place, one)) for place, one in enumerate(results)])

    def refuse_inner(self) -> Tensor:
        """Refuse to differentiate one result by another."""
        raise InputError(
            f"{self._doing()} has become a graph, and the gradient of one of its results by another one is to be "
            "computed, retained or seen by a hook, as it was not for those of its first calls\n"
            "Begin the loop with such calls: they then run operator by operator from the start."
        )

    def _described(self) -> str:
        return repr((self._name, self._arguments, self._results, self._differentiable, self._autocast))

    def _seed_of_step(self) -> int:
        return world().seed()

    def _doing(self) -> str:
        return f"a call of {type(self.module).__name__}"


@dataclass(eq=False)
class Begun:
    """A call that is about to run, or has run its forward.

    Attributes:
        graph: the graph.
        step: its compiled step.
        batch: the inputs of the step.
        tensors: the tensors among the arguments.
        key: what has selected the step.
        used: the results that backward starts from.
        all_parameters: the parameters of the module.
        parameters: those that get a gradient.
    """

    graph: CallGraph
    step: CompiledStep
    batch: Batch
    tensors: list[Tensor]
    key: StepKey
    used: frozenset[int]
    all_parameters: Sequence[nn.Parameter]
    parameters: Sequence[nn.Parameter] = ()
    _inputs: tuple[Any, ...] = ()
    _finish: Callable[..., list[Tensor]] | None = None
    _versions: tuple[int, ...] = ()
    _outputs: Sequence[Tensor] = ()
    _seen: Sequence[int] = ()
    # The arguments, and the buffers that backward reads, with their versions.
    _read: dict[Tensor, int] = field(default_factory=dict)
    # The other buffers that forward has not changed.
    _kept: dict[Tensor, int] = field(default_factory=dict)
    # The buffers that forward changes, as they were.
    _buffers: dict[Tensor, Tensor] = field(default_factory=dict)
    # Those among them to which batch norm writes without counting it.
    _statistics: Sequence[Tensor] = ()
    # The rows of each rank of an output, by its number; None for equal ones.
    _rows: dict[int, tuple[int, ...] | None] = field(default_factory=dict)

    def run(self) -> Any:
        """Run the call, or its forward, and return its result."""
        graph, executor = self.graph, self.step.executor
        graph._check_replicas()
        self._inputs = graph._run_inputs(self.step, executor, self.batch)
        graph._passes_done += 1
        written = graph.written(self.step)
        self._statistics = [one for one, is_statistic in written.items() if is_statistic]
        if not graph._optimizers:
            with _torch.same_versions(self._statistics):
                results = executor(*self._inputs)
            return graph.result(self.step, self._globals(results), self.tensors)
        self._buffers = {one: one.clone() for one in written}
        with _torch.same_versions(self._statistics):
            values, self._finish = executor.start(*self._inputs)
        outputs = self._globals(values)
        # Not those that the caller gets: their node, which holds this object, would never be freed if several share it.
        self._outputs = [output.local if isinstance(output, GlobalTensor) else output.detach() for output in outputs]
        self._versions = _versions(stores_of(self.all_parameters))
        self._seen = list(map(_torch.version, self._outputs))
        buffers = {name: one for name, one in graph._members().buffers.items() if not one.is_inference()}
        read = [buffers[name] for name in graph.known(self.step).read if name in buffers]
        self._read = {one: _torch.version(one) for one in (*self.tensors, *read)}
        self._kept = {one: _torch.version(one) for one in buffers.values() if one not in self._buffers}
        self.parameters = _torch.trained(self.all_parameters)
        wanted = [one for one in self.tensors if one.requires_grad]
        results = _Call.apply(self, outputs, *wanted, *self.parameters)
        for place in graph.known(self.step).template.inner:
            _tie(results[place], graph.refuse_inner)
        return graph.result(self.step, results, self.tensors)

    def backward(self, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of tensors and parameters; None for those that the graph adds to their sums itself.

        The graph goes on after its pause if it computes what is asked for. Else the call runs once more.

        Raises:
            InputError: parameters have changed since forward; or the call cannot run once more.
        """
        owner, used = self.graph._owner, frozenset(n for n, one in enumerate(gradients) if one is not None)
        stores = stores_of(self.all_parameters)
        is_bound = all(self.step.stores.get(one.layout.name) is one for one in stores)
        if is_bound and _versions(stores) != self._versions:
            raise InputError(CHANGED_BEFORE_BACKWARD)
        self._check_same(self._read)
        if torch.is_grad_enabled():
            self._check_same(self._kept)
            return self._again_eagerly(gradients, needed)
        adds = (
            _torch.reaches_all_leaves(deeply=self._finish is None)
            # A parameter that was frozen since gets no gradient, and a hook sees it.
            and len(_torch.trained(self.parameters)) == len(self.parameters)
            and not _torch.has_gradient_hooks(self.parameters)
        )
        goes_on = (
            self._finish is not None
            and used == self.used
            and list(map(_torch.version, self._outputs)) == self._seen
            and is_bound
        )
        # Not every rank may come here: a script may read a value on one rank alone, which waits for the others there.
        check_numbers(f"backward of {self.graph._doing()}", [*gradients, *self.tensors])
        if adds and goes_on:
            return self._go_on(gradients)
        self._check_same(self._kept)
        self.graph.predict(used)
        with owner.hidden():
            again = self.graph.variant(self, used)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._buffers_as_before())
                sums = None if adds else stack.enter_context(owner.gradients.aside(self.parameters))
                with _torch.same_versions(self._statistics):
                    _, again._finish = again.step.executor.start(*again._inputs)
                found = again._go_on(gradients)
        if sums is None:
            return found
        found[len(found) - len(self.parameters) :] = [sums.get(one) for one in self.parameters]
        return [one if wanted else None for one, wanted in zip(found, needed, strict=True)]

    def _check_same(self, versions: Mapping[Tensor, int]) -> None:
        """Raise an InputError if one of these tensors was changed since forward."""
        if any(_torch.version(one) != version for one, version in versions.items()):
            raise InputError(
                f"an argument or a buffer of {self.graph._doing()} was changed in place before backward(), which needs "
                "it as it was\nChange a copy of it, or after backward()."
            )

    def _go_on(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the rest of the graph; return the gradient of each tensor that wants one, and None for parameters."""
        finish, self._finish = self._finish, None
        assert finish is not None
        parts = []
        for place in self.step.gradient_places:
            gradient = gradients[place]
            if gradient is None:
                parts.append(torch.zeros_like(self._outputs[place]))
                continue
            if not world().is_alone:
                gradient = dispatch.boxed(GlobalTensor, gradient, self.step.outputs[place][0], self._rows[place]).local
            parts.append(gradient.contiguous() if world().slices is None else from_whole_vector(gradient))
        values = finish(self.step.number_values(), parts)
        if stores := self.step.summed:
            values, gradients = values[: -len(stores)], values[-len(stores) :]
            add_gradients(stores, gradients)
        self.graph._owner.gradients.note(self.step.differentiated)
        # None where a tensor has no part in the result.
        leaves = self.step.returned(self.batch)[len(self._outputs) : -1]
        rest = iter(self._globals(values[len(self._outputs) :], len(self._outputs)))
        found = [next(rest) if leaf is Tensor else None for leaf in leaves]
        return [*found, *(None for _ in self.parameters)]

    def _again_eagerly(self, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """Return gradients that can be differentiated, by running the call once more on global tensors.

        Raises:
            InputError: the call has drawn random numbers, which would be others now, or what it reads has changed.
        """
        kind = self.graph._kind
        kind.is_eager, kind.graph = True, None
        draws, is_same = self.step.executor.draws, False
        if not draws:
            with self.graph._owner.hidden():
                is_same = self.graph.ready(self.tensors, self.all_parameters).step.captured is self.step.captured
        if not is_same:
            reason = "draws random numbers" if draws else "would compute something else by now"
            raise InputError(
                f"{self.graph._doing()} {reason}, and its gradients are to be differentiated (create_graph=True), "
                "which those of its first calls were not\n"
                "Begin the loop with such calls: they then run operator by operator from the start."
            )
        with torch.enable_grad(), self._buffers_as_before():
            result = self.graph._owner.run_eagerly(self.graph.module, *self.graph.arguments(self.tensors))
            given = {place: one for place, one in enumerate(gradients) if one is not None}
            results = found_in(result, Tensor)
            outputs = [results[place] for place in given]
            sources = [*(one for one in self.tensors if one.requires_grad), *self.parameters]
            wanted = [*itertools.compress(sources, needed)]
            found = iter(torch.autograd.grad(outputs, wanted, [*given.values()], create_graph=True, allow_unused=True))
        return [next(found) if is_needed else None for is_needed in needed]

    @contextlib.contextmanager
    def _buffers_as_before(self) -> Iterator[None]:
        """Give the buffers that forward has changed the values of before inside the block."""
        now = {one: one.clone() for one in self._buffers}
        self._set_buffers(self._buffers)
        try:
            yield
        finally:
            self._set_buffers(now)

    def _set_buffers(self, values: Mapping[Tensor, Tensor]) -> None:
        with torch.no_grad(), _torch.same_versions(self._statistics):
            for buffer, value in values.items():
                buffer.copy_(value)

    def _globals(self, values: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Return the global tensors of outputs from a first one on, which are plain ones in a job of one rank."""
        values = [value.detach().contiguous() for value in values]
        if world().is_alone:
            return values
        now, outputs = world(), self.step.outputs[first : first + len(values)]
        sbps = [sbp for sbp, _ in outputs]
        rows: list[tuple[int, ...] | None] = [None] * len(values)
        if any(isinstance(one, GlobalTensor) and one.spec.rows is not None for one in self.tensors):
            dims = [next((one.dim for one in sbp if isinstance(one, Split)), None) for sbp in sbps]
            own = [0 if dim is None else value.shape[dim] for dim, value in zip(dims, values, strict=True)]
            sizes = zip(*agree(world().job, self.graph._doing(), 0, dict, None, own), strict=True)
            rows = [None if dim is None or len({*row}) == 1 else row for dim, row in zip(dims, sizes, strict=True)]
        self._rows |= dict(enumerate(rows, first))
        if now.mesh.slices is None:
            results = [GlobalTensor.of_part(*one) for one in zip(values, sbps, rows, strict=True)]
        else:
            # A part of the graph's has what a global tensor's has besides its own slices.
            strides = [torch.empty(shape, device="meta").stride() for _, shape in outputs]
            results = [
                GlobalTensor(value, now.spec(tuple(shape), stride, value.dtype, value.device, sbp))
                for value, (sbp, shape), stride in zip(values, outputs, strides, strict=True)
            ]
        now.calls += 1
        for number, one in enumerate(results, first):
            one.history = hash((now.calls, number))
        return [*results]


def _versions(stores: Sequence[Store]) -> tuple[int, ...]:
    return tuple(_torch.version(store.flat) for store in stores if isinstance(store.flat, Tensor))


_NOTHING = torch.empty(0)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Begun, outputs: list[GlobalTensor], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.begun = begun
        # Torch frees it after backward, and refuses another backward without it.
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        flags = begun.graph.known(begun.step).template.differentiable
        ctx.mark_non_differentiable(*(one for one, wanted in zip(outputs, flags, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        begun: Begun = ctx.begun
        assert ctx.saved_tensors
        return None, None, *begun.backward(gradients, ctx.needs_input_grad[2:])


def is_rows(sbp: NdSbp) -> bool:
    """Return whether a tensor of this SBP is split by rows."""
    return sbp == (Split(0),)


def _input(tensor: Tensor) -> Tensor:
    """Return a tensor as an argument of a graph."""
    if world().is_alone:
        return tensor.detach()
    sbp = tensor.sbp if isinstance(tensor, GlobalTensor) and is_rows(tensor.sbp) else world().whole
    placed, of_rows = dispatch.boxed(GlobalTensor, tensor, sbp), is_rows(sbp)
    plain: Tensor = placed.local if of_rows or not placed.dim() else placed.to_dtensor()
    return of_own_slices(plain, 0, world().mesh) if of_rows else plain
