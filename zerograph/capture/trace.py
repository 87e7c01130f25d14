"""Trace ``build()`` and its ``backward()`` into one functional graph of ATen operators on global tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base.recording import followed
from zerograph.base.source import warn_user
from zerograph.capture import decompositions, module_attributes, random_operators
from zerograph.capture.captured import Captured
from zerograph.capture.cleanup import clean, strip_profiling
from zerograph.capture.local import Capturing, inside
from zerograph.capture.modes import FunctionMode, Recorder, check_shapes, explained, module_paths, reads_uncaught
from zerograph.capture.places import Place
from zerograph.capture.refused_calls import refused_calls, refused_output
from zerograph.capture.state_changes import StateComparison
from zerograph.capture.substitutes import substituted
from zerograph.errors import CaptureError, InputError, ZeroGraphError
from zerograph.ir import finite_check
from zerograph.ir.dims import Dim, SizeGuard
from zerograph.ir.finite_check import Overflow
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.gradient_edits import TOTAL_NORM, total_norm
from zerograph.ir.metadata import Role, meta
from zerograph.ir.region import Region
from zerograph.ir.sizes import Sizes, inline_sizes
from zerograph.ir.step_graph import found_inf_role, output_nodes, placeholders, restore_origins

# The name of the optimizer in the graph, the group, and the names of its parameters.
ParameterGroups = Sequence[tuple[str, dict[str, Any], Sequence[str]]]


@dataclass(frozen=True)
class TensorSpec:
    """Global shape, dtype and device of a tensor that enters the step."""

    shape: tuple[int | Dim, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of a tensor without dynamic dimensions."""
        return math.prod(size for size in self.shape if isinstance(size, int))

    def fake(self, sizes: Sizes | None = None) -> Tensor:
        """Return an empty tensor like this; inside a fake mode, a fake one.

        Args:
            sizes: has the symbols of dynamic dimensions, if there are any.
        """
        shape: Any = self.shape if sizes is None else sizes.concrete(self.shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class Capture:
    """A capture of ``build(*args, **kwargs)`` and the ``backward()`` inside it. It reads and writes no weight.

    Attributes:
        build: called with fake tensors of global shape, and called again where its first trace shows a need for it.
        root: holds every module that ``build`` uses.
        parameters: each distinct parameter of ``root`` by qualified name; the first inputs of the graph.
        buffers: each distinct buffer by qualified name; the inputs after the parameters.
        aliases: further names of the same tensors (tied weights), mapped to the names above.
        inputs: the flat tensors that ``arrange`` turns into ``(args, kwargs)``.
        arrange: returns ``(args, kwargs)`` of ``build`` for the flat tensors.
        train: optimizers are registered, so some parameter must get a gradient.
        ranks: number of parts that the batch is split into, over ranks and micro-batches; only local regions depend
            on it.
        groups: the optimizers' parameter groups; ``zero_grad()`` acts on them.
        clip_grad_norm: the norm that all gradients together are clipped to after ``build()``; None for no clipping.
        batch_norm_groups: equal parts of the batch, each of which batch norm normalises by itself.
        amp_dtype: the dtype of ``torch.autocast`` around ``build()``; None for none.
        scaled: multiply the loss by an input of the graph, and unscale the gradients; accumulated ones are scaled.
        checked: also return whether losses and gradients are finite (:mod:`zerograph.ir.finite_check`).
        accumulated: names of parameters whose gradients are inputs: earlier graphs have computed them.
        pure: ``build()`` must change no Python state.
        guarded: places of Python state that are guards already: the caller captures again when one changes.
        sizes: global size of each dynamic dimension of ``inputs`` in the call.
    """

    build: Callable[..., Any]
    root: nn.Module
    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    inputs: Sequence[TensorSpec]
    arrange: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    train: bool
    ranks: int
    groups: ParameterGroups = ()
    clip_grad_norm: float | None = None
    batch_norm_groups: int = 1
    amp_dtype: torch.dtype | None = None
    scaled: bool = False
    checked: bool = False
    accumulated: Sequence[str] = ()
    pure: bool = False
    guarded: Sequence[Place] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def trained(self) -> Mapping[str, Collection[str]]:
        """The names of each optimizer's parameters, by the optimizer's name in the graph."""
        trained: dict[str, set[str]] = {}
        for optimizer, _, names in self.groups:
            trained.setdefault(optimizer, set()).update(names)
        return trained

    def run(self) -> Captured:
        """Trace ``build()`` and return its graph.

        Raises:
            CaptureError: ``build`` reads a value while it is traced, draws random numbers that no graph can repeat,
                runs ``backward()`` on a non-scalar or, with ``train``, not at all. Or it computes with a parameter
                that belongs to no module of the graph, with a tensor that the previous step should have left in an
                attribute, or with random numbers of Python or numpy. With ``pure`` it changes Python state.
        """
        hints = {dim.name: dim.hint for dim in self._dims()}
        # Dimensions that ranks or micro-batches split by rows.
        parted = {dim.name for dim in self._dims() if dim.rows and dim.pieces > 1}
        for _ in range(_MOST_TRACES):
            try:
                captured = self._captured(hints)
            except ZeroGraphError:
                raise
            except Exception as error:
                hints = self._fixed(hints, error)
                continue
            refuted = [guard for guard in captured.guards if not guard.holds(self.sizes)]
            self._refuse_one_row(refuted)
            # Parts of a number of rows that is fixed may still be unequal, which no symbol would say.
            if fixed := [guard for guard in captured.guards if guard.fixes and guard.symbols & parted]:
                refuted = fixed
                break
            if not refuted:
                return captured
            hints = other_hints(self._dims(), hints, captured.guards, self.sizes)
        raise CaptureError(
            "build() needs a size of its inputs as a Python number, so no graph serves several sizes "
            f"({refuted[0].condition})\n  {refuted[0].line}   {refuted[0].code}\n"
            "Use x.shape[0] for len(x), and operators on the whole tensor for a loop over its rows; or set "
            "config.dynamic_shapes = False: each size is then compiled by itself, and ranks hold equally many rows."
        )

    def _fixed(self, hints: Mapping[str, int], error: Exception) -> dict[str, int]:
        """Return hints with those sizes of the call that ``build()`` fixes, after a trace with other hints failed.

        Raises:
            Exception: ``build()`` fails for the sizes of the call too, or the ``error`` has another cause.
        """
        sizes = {dim.name: self.sizes[dim.name] for dim in self._dims() if self.sizes[dim.name] % dim.pieces == 0}
        fixed = {name for guard in self._captured({**hints, **sizes}).guards if guard.fixes for name in guard.symbols}
        found = {**hints, **{name: sizes[name] for name in fixed}}
        if found == hints:
            raise error
        return found

    def _refuse_one_row(self, refuted: Sequence[SizeGuard]) -> None:
        """Raise if the ranks hold one row together and ``build()`` computes something else for one than for several.

        Raises:
            InputError: no graph serves one row over several ranks.
        """
        single = {dim.name for dim in self._dims() if dim.rows and dim.pieces > 1 and self.sizes[dim.name] == 1}
        for guard in refuted:
            if guard.symbols & single:
                raise InputError(
                    "the whole batch has one row, and build() computes something else for one row than for several "
                    f"({guard.condition})\n  {guard.line}   {guard.code}\n"
                    "Leave such a batch out on all ranks, or let build() do the same for any number of rows: "
                    "x.squeeze(1) for x.squeeze()."
                )

    def _dims(self) -> list[Dim]:
        return sorted({size for spec in self.inputs for size in spec.shape if isinstance(size, Dim)}, key=str)

    def _captured(self, hints: Mapping[str, int]) -> Captured:
        tracer = _Tracer(self, hints)
        if self.pure:
            tracer.python_state.check_restorable()
        with tracer.environment(), refused_output() if self.pure else contextlib.nullcontext():
            graph, trace, stored = self._traced(tracer)
            module_attributes.refuse_constants(graph, stored)
            if self.pure:
                # A table that depends on no input is not kept either.
                tracer.python_state.check_unchanged(trace.attributes)
            if stored:
                warn_user(module_attributes.lost_tensors(stored))
            state_changes = tracer.python_state.compare(graph, tracer.trial)
            strip_profiling(graph.graph)
            graph = without_mutation(graph)
            tracer.sizes.close()
        inline_sizes(graph.graph)
        self._name_roles(graph.graph, trace)
        tracer.sizes.guard_squeezes(graph.graph)
        clean(graph.graph, self.trained)
        graph.recompile()
        return Captured(
            graph,
            trace.output_spec,
            tuple(trace.returned),
            tuple(trace.gradients),
            tuple(trace.regions),
            state_changes,
            tracer.sizes.guards,
            tracer.sizes if tracer.sizes.dims else None,
        )

    def _traced(self, tracer: _Tracer) -> tuple[fx.GraphModule, _Trace, Mapping[str, Tensor]]:
        """Return the graph, what its trace noted, and the tensors that ``build()`` stores in attributes, by path."""
        graph, trace = tracer.trace()
        if self.scaled and trace.gradients and not trace.backward_calls and not self.accumulated:
            raise CaptureError(
                "the loss is to be scaled, but build() makes gradients without calling backward()\n"
                "Call loss.backward(), or set config.precision.grad_scaler to None."
            )
        if self.scaled and trace.backward_calls > 1:
            # The first trace unscaled the gradients after the first backward() of several.
            tracer.python_state.remove_traced()
            graph, trace = tracer.trace()
        stored = module_attributes.take_computed(graph, trace.attributes)
        if stored:
            # A trace of the next step shows whether build() reads them before it writes them.
            tracer.python_state.remove_traced(keep=list(stored.values()))
            try:
                graph, trace = tracer.trace()
            except Exception as error:
                raise module_attributes.stored_tensor_read(*next(iter(stored.items()))) from error
            module_attributes.take_computed(graph, trace.attributes)
        if self.train and not trace.gradients:
            raise CaptureError(
                "an optimizer is registered, but build() gave no parameter a gradient\n"
                "Call loss.backward() inside build(), on a loss that depends on the model's parameters."
            )
        return graph, trace, stored

    def _name_roles(self, graph: fx.Graph, trace: _Trace) -> None:
        """Set the roles of inputs and outputs, and the origins of all nodes."""
        inputs = [Role("parameter", name) for name in self.parameters] + [Role("buffer", name) for name in self.buffers]
        inputs += [Role("seed", "seed"), *([Role("scaler", "scale")] if self.scaled else [])]
        inputs += [Role("gradient", name) for name in self.accumulated]
        for index, node in enumerate(placeholders(graph)):
            meta(node)["role"] = inputs[index] if index < len(inputs) else Role("input", str(index - len(inputs)))
        last_outputs = [*(Role("gradient", name) for name in trace.gradients), *trace.checks]
        outputs = len(output_nodes(graph)) - len(last_outputs)
        meta(graph.output_node())["roles"] = [*(Role("output", str(i)) for i in range(outputs)), *last_outputs]
        restore_origins(graph)


# A size that is asked about may need another hint, with which the trace may ask about more.
_MOST_TRACES = 6


@dataclass
class _Trace:
    """The results of one trace of ``build()`` besides its graph.

    Attributes:
        output_spec: structure of what ``build()`` returned.
        returned: its leaves; the class ``Tensor`` stands for a tensor.
        gradients: names of the parameters that have a gradient.
        checks: roles of the outputs after the gradients: overflow flags and residues.
        norms: norms that ``build()`` requires to be finite.
        regions: local regions that ``build()`` called.
        attributes: tensors of the trace that ``build()`` left in attributes, by path.
        backward_calls: number of calls of ``backward()``.
    """

    output_spec: Any = None
    returned: list[Any] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    checks: list[Role] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    attributes: dict[str, Tensor] = field(default_factory=dict)
    backward_calls: int = 1


class _Tracer:
    """The fake tensors of a capture, and traces of ``build()`` on them.

    Attributes:
        state: the fake parameters and buffers, by name.
        python_state: the Python state that ``build()`` can reach, as it was before.
    """

    def __init__(self, capture: Capture, hints: Mapping[str, int]) -> None:
        self._capture = capture
        dims = [replace(dim, hint=hints[dim.name]) for dim in capture._dims()]
        self._mode = _torch.fake_mode()
        self.sizes = Sizes(_torch.size_env(self._mode), dims)
        # Fakes whose writes are counted, in inference mode too.
        with torch.inference_mode(False), self._mode:
            parameters = capture.parameters.items()
            self.state: dict[str, Tensor] = {
                name: nn.Parameter(spec.fake(), spec.requires_grad) for name, spec in parameters
            }
            self.state |= {name: spec.fake() for name, spec in capture.buffers.items()}
            for name, fake in self.state.items():
                is_parameter = name in capture.parameters
                original = capture.root.get_parameter(name) if is_parameter else capture.root.get_buffer(name)
                _copy_attributes(original, fake)
                # Weakly: graphs keep their fakes.
                fake._zerograph_original = weakref.ref(original)  # type: ignore[attr-defined]
            batch = [spec.fake(self.sizes) for spec in capture.inputs]
            seed = torch.empty((), dtype=torch.int64)
            self._device = next((tensor.device for tensor in self.state.values()), torch.device("cpu"))
            scale = [torch.empty((), device=self._device)] if capture.scaled else []
            gradients = [capture.parameters[name].fake() for name in capture.accumulated]
        self._inputs = [*self.state.values(), seed, *scale, *gradients, *batch]
        self._draws = random_operators.Draws()
        self._table = decompositions.table(capture.batch_norm_groups) | random_operators.table(self._draws)
        if dims:
            self._table |= decompositions.symbolic_table()
        # A local region computes on one rank's part: there batch norm has one group.
        self._region_table = decompositions.table() | random_operators.table(self._draws)
        self._backward_calls = 1
        groups = [group for _, group, _ in capture.groups]
        self.python_state = StateComparison(capture.build, capture.root, groups, capture.guarded, self._mode)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Set up everything that traces need; at the end put back the Python state that must not stay."""
        with (
            self.python_state.restored(),
            self._mode,
            # With oneDNN a recurrent layer is one opaque kernel; without, the operators that rules know.
            _torch.without_onednn(),
            _torch.eager_checkpoint_policies(),
            refused_calls(),
            _torch.compiling(),
            _torch.preserved_metadata(),
            _torch.errors_unlogged(),
            explained(),
        ):
            yield

    def trace(self) -> tuple[fx.GraphModule, _Trace]:
        """Trace ``build()``; later traces expect as many calls of ``backward()``."""
        graph, trace = self._trace()
        self._backward_calls = trace.backward_calls
        return graph, trace

    def trial(self) -> fx.GraphModule:
        """Trace ``build()`` from the present Python state, to compare the graph with another one."""
        self.python_state.remove_traced()
        graph, trace = self._trace()
        module_attributes.take_computed(graph, trace.attributes)
        return graph

    def _trace(self) -> tuple[fx.GraphModule, _Trace]:
        trace = _Trace()
        self._draws.count = 0
        for tensor in self.state.values():
            tensor.grad = None
        return _torch.trace(lambda *tensors: self._step(trace, tensors), self._inputs, self._table), trace

    @followed
    def _step(self, trace: _Trace, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run ``build()`` on the tensors that the tracer follows; return outputs, gradients, checks and attributes."""
        capture = self._capture
        state = dict(zip(self.state, tensors, strict=False))
        self._draws.seed, *inputs = tensors[len(state) :]
        parameters = {name: state[name] for name in capture.parameters}
        loss_scale = inputs.pop(0) if capture.scaled else None
        for name in capture.accumulated:
            parameters[name].grad = inputs.pop(0)
        backward = Backward(self._device.type, loss_scale, self._backward_calls, parameters, capture.trained)
        args, kwargs = capture.arrange(inputs)
        with self._inside_build(trace, state, backward):
            if capture.accumulated:
                backward.unscale()
            dtype = capture.amp_dtype
            with nullcontext() if dtype is None else torch.autocast(self._device.type, dtype):
                leaves, trace.output_spec = pytree.tree_flatten(capture.build(*args, **kwargs))
            if capture.clip_grad_norm is not None and any(tensor.grad is not None for tensor in parameters.values()):
                nn.utils.clip_grad_norm_(list(parameters.values()), capture.clip_grad_norm)
            module_attributes.keep_assigned(capture.root, capture.parameters, capture.buffers, capture.aliases, state)
        check_shapes(capture.buffers, state)
        # Recurrent layers list their parameters in an attribute.
        own = set(map(id, tensors))
        trace.attributes = {path: x for path, x in self.python_state.traced_tensors().items() if id(x) not in own}
        trace.backward_calls = backward.calls
        trace.returned = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
        trace.gradients = list(gradients)
        checks = [(found_inf_role(overflow.optimizer), overflow.flag) for overflow in backward.overflows]
        losses, updating = trace.norms, list[Tensor]()
        if capture.checked:
            scalars = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.dim()]
            losses, updating = [*losses, *backward.roots, *scalars], list(gradients.values())
            if capture.scaled:
                # In gradients without an optimizer an overflow looks like any other cause.
                updated = set().union(*capture.trained.values())
                updating = [gradient for name, gradient in gradients.items() if name in updated]
        if losses or updating:
            checks += finite_check.residues(losses, updating, backward.overflows)
        trace.checks = [role for role, _ in checks]
        return [
            *(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)),
            *gradients.values(),
            *(value for _, value in checks),
            *(tensor.detach() for tensor in trace.attributes.values()),
        ]

    @contextlib.contextmanager
    def _inside_build(self, trace: _Trace, state: dict[str, Tensor], backward: Backward) -> Iterator[None]:
        """Replace parameters, buffers and the parts of torch that a trace handles itself."""
        capture = self._capture
        reads: list[CaptureError] = []
        with (
            substituted(counts_any=not capture.pure),
            reads_uncaught(reads),
            self._replaced(state),
            _swapped_groups(capture.groups, state),
            _torch.replaced_total_norm(functools.partial(total_norm, checked=None if capture.scaled else trace.norms)),
            FunctionMode(reads),
            module_paths(capture.root) as path,
            Recorder(path, reads),
            inside(
                Capturing(
                    capture.ranks,
                    self._mode,
                    self._region_table,
                    self._draws,
                    lambda: Recorder(path, reads),
                    self._replaced,
                    state,
                    trace.regions,
                )
            ),
            self._draws.replacing_torchs(),
            _torch.replaced_backward(backward.run),
            torch.enable_grad(),
        ):
            yield

    def _replaced(self, tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        aliased = {alias: tensors[name] for alias, name in self._capture.aliases.items()}
        return _torch.with_tensors(self._capture.root, dict(tensors) | aliased)


def _copy_attributes(original: Tensor, fake: Tensor) -> None:
    """Copy what users attach to a parameter, attributes and hooks on its gradient, to the one that ``build()`` sees."""
    for name, value in vars(original).items():
        if not name.startswith("_zerograph"):
            vars(fake).setdefault(name, value)
    if fake.requires_grad:
        ((gradient_hooks, accumulate_hooks),) = _torch.gradient_hooks([original])
        for hook in gradient_hooks:
            fake.register_hook(hook)
        for hook in accumulate_hooks:
            fake.register_post_accumulate_grad_hook(hook)


def original_of(tensor: Tensor) -> Tensor:
    """Return the parameter or buffer that a fake stands for while ``build()`` is traced; any other tensor itself."""
    reference: Callable[[], Tensor | None] | None = getattr(tensor, "_zerograph_original", None)
    original = None if reference is None else reference()
    return tensor if original is None else original


@contextlib.contextmanager
def _swapped_groups(groups: ParameterGroups, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give optimizers the traced parameters: ``zero_grad()`` clears their gradients, and clipping finds them."""
    before = [group["params"] for _, group, _ in groups]
    for _, group, names in groups:
        group["params"] = [tensors[name] for name in names]
    try:
        yield
    finally:
        for (_, group, _), parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def other_hints(
    dims: Sequence[Dim], hints: Mapping[str, int], guards: Sequence[SizeGuard], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return hints for which all guards decide as for the sizes of the call."""
    hints = dict(hints)
    for dim in dims:
        mine = [guard for guard in guards if dim.name in guard.symbols]
        if all(guard.holds(hints) == guard.holds(sizes) for guard in mine):
            continue
        size, pieces = sizes[dim.name], dim.pieces
        if any(guard.fixes for guard in mine):
            hints[dim.name] = size if size % pieces == 0 else hints[dim.name]
            continue
        near = [prime * factor * pieces for factor in (1, 2, 4, 8, 16) for prime in _primes_near(size, factor * pieces)]
        for hint in [*near, size]:
            if hint % pieces == 0 and all(
                guard.holds({**hints, dim.name: hint}) == guard.holds(sizes) for guard in mine
            ):
                hints[dim.name] = hint
                break
    return hints


def _primes_near(size: int, factor: int) -> list[int]:
    """Return primes whose product with ``factor`` is about ``size``, nearest first."""
    around = sorted(range(3, 2 * size // factor + 16), key=lambda number: abs(number * factor - size))
    primes = (number for number in around if all(number % low for low in range(2, math.isqrt(number) + 1)))
    return list(itertools.islice(primes, 8))


class Backward:
    """The replacement of ``torch.autograd.backward`` while ``build()`` is traced.

    Its order is that of ``torch.amp.GradScaler``: every call starts from the scaled loss, and the last one unscales the
    gradients. So ``build()`` then edits unscaled gradients.

    Args:
        device: type of the device that autocast was entered for.
        scale: the loss scale, 0-d; None for none.
        expected_calls: the call of this number is the last one.
        parameters: the parameters whose gradients are unscaled, by name.
        trained: the names of each optimizer's parameters, by the optimizer's name in the graph.

    Attributes:
        calls: number of calls so far.
        roots: the unscaled tensors that it was called on.
        overflows: the overflow of each optimizer with gradients; empty until the last call. Gradients of parameters
            without an optimizer do not count, as with ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: str,
        scale: Tensor | None,
        expected_calls: int,
        parameters: Mapping[str, Tensor],
        trained: Mapping[str, Collection[str]],
    ) -> None:
        self.calls = 0
        self.roots: list[Tensor] = []
        self.overflows: list[Overflow] = []
        self._device, self._scale, self._expected_calls = device, scale, expected_calls
        self._parameters, self._trained = parameters, trained

    def run(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run ``torch.autograd.backward``, the ``original``, from the scaled tensors."""
        if _torch.backward_sequence_number() is not None:
            # A reentrant checkpoint calls backward() inside backward(): its gradients are scaled already.
            original(tensors, *args, **kwargs)
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self.roots += roots
        if self._scale is not None:
            tensors = [root * self._scale for root in roots]
        # Each operator's backward computes in the dtype of its forward; autocast would cast once more.
        # Meta tensors, for which a step can be prepared, have no autocast.
        available = torch.amp.is_autocast_available(self._device)
        with torch.autocast(self._device, enabled=False) if available else nullcontext():
            original(tensors, *args, **kwargs)
            self.calls += 1
            if self.calls == self._expected_calls:
                self.unscale()

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the gradients by the scale, if there is one, and note which overflowed."""
        if self._scale is None:
            return
        with_gradient = {name: tensor for name, tensor in self._parameters.items() if tensor.grad is not None}
        for optimizer, names in self._trained.items():
            gradients = [tensor.grad for name, tensor in with_gradient.items() if name in names]
            if gradients:
                largest = TOTAL_NORM(gradients, float("inf"))
                name = optimizer if len(self._trained) > 1 else ""
                self.overflows.append(Overflow(name, largest, torch.isfinite(largest).logical_not().float()))
        inverse = self._scale.double().reciprocal().float()
        for parameter in with_gradient.values():
            parameter.grad = parameter.grad * inverse  # type: ignore[operator]
