"""Fake tensors, tracing with ``make_fx``, metadata of nodes, and Inductor."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import linecache
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._C import _functorch as functorch
from torch._decomp import decompositions as torchs, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from zerograph._torch.fake_results import FakeResults
from zerograph._torch.shapes import SYMBOLIC_SHAPES, has_symbols
from zerograph._torch.sizes import SizeEnv, in_env
from zerograph.base.contexts import replaced


def _register_fused_updates() -> torch.library.Library:
    """Register meta kernels that return nothing for the fused optimizer updates.

    Torch registers only some of them. For the others a fake tensor runs the kernel itself on zeros of the full size;
    on CUDA that kernel reads our step counts, which are on another device, and does not check it.
    """
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        for overload in getattr(torch.ops.aten, name).overloads():
            full = name if overload == "default" else f"{name}.{overload}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "Meta"):
                library.impl(full, lambda *args, **kwargs: None)
    return library


# The registrations live as long as this library.
_fused_updates = _register_fused_updates()


_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo") + os.sep


class CachingFakeMode(FakeTensorMode):
    """A fake mode with a cache, and with the shapes of :mod:`zerograph._torch.shapes`.

    Attributes:
        results: values of nodes by operator and arguments (:mod:`zerograph.ir.evaluate`).
        fake_results: results of operators, in place of torch's cache; None computes each result.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.results: dict[Any, Any] = {}
        self.fake_results: FakeResults | None = FakeResults()
        self.cache_enabled = False

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in SYMBOLIC_SHAPES and has_symbols((args, kwargs)):
            with self:
                return SYMBOLIC_SHAPES[func](*args, **kwargs)
        compute = functools.partial(super()._dispatch_impl, func, types, args, kwargs)
        if self.fake_results is None:
            return compute()
        return self.fake_results.call(self, compute, func, args, kwargs)


def fake_mode() -> CachingFakeMode:
    """Return a mode for tensors that have shape and dtype but no data.

    Its shape environment makes ``lr.item()`` of an optimizer's update a node.
    """
    return CachingFakeMode(shape_env=SizeEnv(allow_scalar_outputs=True, duck_shape=False), allow_non_fake_inputs=True)


def fake_mode_of(tensor: Tensor) -> FakeTensorMode:
    """Return the mode of a fake tensor."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def size_env(mode: FakeTensorMode) -> SizeEnv:
    """Return the shape environment of a mode of :func:`fake_mode`."""
    assert isinstance(mode.shape_env, SizeEnv)
    return mode.shape_env


def fake_inputs(values: Sequence[Tensor]) -> list[Tensor]:
    """Return fake tensors like ``values`` in a mode of their own, without the symbols of the graph's mode.

    Some compilers fail on those symbols.
    """
    with FakeTensorMode(shape_env=ShapeEnv()):
        return [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in values]


def trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    decomposition_table: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Trace a function over fake arguments with ``make_fx``, which runs real autograd and real optimizers."""
    tracer = make_fx(
        function,
        dict(decomposition_table or {}),
        # Constants that a model creates (masks, position tables) are real tensors among fake ones.
        _allow_non_fake_inputs=True,
        # Our own mode rejects item() in build() with the user's line; the optimizer's lr may use it.
        _error_on_data_dependent_ops=False,
    )
    with _use_lazy_graph_module(True), _own_module_methods():
        return tracer(*arguments)


def _own_module_methods() -> contextlib.AbstractContextManager[None]:
    """Let fx call methods of ``nn.Module`` that a user has replaced, not those of when it was imported."""
    now: dict[str, Any] = {"_orig_module_call": nn.Module.__call__, "_orig_module_getattr": nn.Module.__getattr__}
    # Inside of another trace the methods are fx's.
    own = {name: one for name, one in now.items() if getattr(one, "__globals__", None) is not vars(_symbolic_trace)}
    return replaced((_symbolic_trace, name, method) for name, method in own.items())


def node_of(tensor: Tensor) -> fx.Node | None:
    """Return the node of a tensor in the running trace; None outside of traces and for constants.

    Only the tracer knows it, and keeps it in private slots.
    """
    mode = get_proxy_mode()
    if mode is None:
        return None
    node: fx.Node | None = get_proxy_slot(tensor, mode.tracer, None, lambda value: value.proxy.node)
    return node


def constant_of(node: fx.Node) -> Any:
    """Return what a node ``get_attr`` of the running trace reads: only the tracer has it until the trace ends."""
    return getattr(get_proxy_mode().tracer.root, str(node.target))  # type: ignore[union-attr]


def forget_sources() -> None:
    """Drop the sources of generated functions that are gone: torch keeps those of all for tracebacks."""
    sources = torch.fx.graph_module._loader.eval_cache
    used = {one.__code__.co_filename for one in gc.get_objects() if type(one) is FunctionType}
    for name in sources.keys() - used:
        del sources[name]
        linecache.cache.pop(name, None)


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return ``fx.GraphModule(root, graph)`` that generates its Python code on first use."""
    with _use_lazy_graph_module(True):
        module: fx.GraphModule = _make_graph_module(root, graph)
    return module


@contextlib.contextmanager
def python_decompositions() -> Iterator[None]:
    """Run composite operators through torch's decompositions in Python, which keep symbolic sizes.

    Those of recurrent layers in C++ read sizes as integers. The dispatcher is private; ``make_fx`` uses it likewise.
    Torch's decomposition of stacked layers leaves out the dropout between them (``num_layers < i - 1``).
    """
    with enable_python_dispatcher(), patch.object(torchs, "_rnn_helper", _run_layers):
        yield


_RUN_LAYERS: Callable[..., Any] = torchs._rnn_helper


def _run_layers(x: Any, hidden: Any, params: Any, has_biases: bool, count: int, dropout: float, *rest: Any) -> Any:
    """Run stacked recurrent layers, with dropout between them, as torch's function of these arguments is to."""
    train, *others, layer = rest
    given = read = None

    def run_layer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal given, read
        # Both directions of a layer read the same input.
        if x is not given:
            read = x if given is None else torch.dropout(x, dropout, train)
            given = x
        return layer(read, *args, **kwargs)

    return _RUN_LAYERS(x, hidden, params, has_biases, count, 0.0, train, *others, run_layer)


def functional_trace(graph: fx.GraphModule, arguments: Sequence[Any], traced: Collection[fx.Node]) -> fx.GraphModule:
    """Trace a captured graph again without mutation; writes to arguments become final ``copy_`` nodes.

    ``torch.func.functionalize`` does not support ``backward()`` inside, so this is a second trace over plain operators.

    Args:
        graph: the graph.
        arguments: fake values of its inputs.
        traced: all nodes that may share memory with what the graph writes, and all that read constants or what such a
            node returns besides tensors. The other ones are copied, in a fraction of the time.
    """
    with fx_traceback.preserve_node_meta(), torch.no_grad():
        run = _TracesSome(graph, traced).run
        return trace(torch.func.functionalize(run, remove="mutations"), arguments)


class _TracesSome(fx.Interpreter):
    """Run some nodes of a graph inside of ``functionalize``, and copy the others into the running trace."""

    def __init__(self, graph: fx.GraphModule, traced: Collection[fx.Node]) -> None:
        super().__init__(graph)
        self._traced = traced
        self._copies: dict[fx.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or n in self._traced:
            return super().run_node(n)
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        copy = self._copies[n] = tracer.graph.node_copy(n, self._node)
        value = n.meta["val"]
        if isinstance(value, Tensor):
            track_tensor(value, fx.Proxy(copy, tracer), constant=None, tracer=tracer)
            return functorch._wrap_functional_tensor(value, functorch.maybe_current_level())  # type: ignore[arg-type]
        if not isinstance(value, (list, tuple)):
            track_tensor_tree(value, fx.Proxy(copy, tracer), constant=None, tracer=tracer)
        return value

    def _node(self, source: fx.Node) -> fx.Node:
        """Return the node of the running trace that has a source's value of now."""
        value = self.env[source]
        if not isinstance(value, Tensor):
            return self._copies[source]
        torch._sync(value)  # type: ignore[attr-defined]
        node = node_of(functorch._unwrap_functional_tensor(value, True))
        assert node is not None
        return node


def compiling() -> contextlib.AbstractContextManager[Any]:
    """Make ``torch.compiler.is_compiling()`` true, so that optimizers and models take their traceable branches."""
    return patch.object(torch.compiler, "_is_compiling_flag", True)


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable the current trace and fake mode, for an independent trace within another one."""
    return _disable_current_modes()


def preserved_metadata() -> contextlib.AbstractContextManager[None]:
    """Keep the values of :func:`annotated` on new nodes, also through a second trace."""
    return fx_traceback.preserve_node_meta()


def annotated(values: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Write ``values`` to ``node.meta["custom"]`` of new nodes, the only custom field that fx copies along."""
    return fx_traceback.annotate(values)


def errors_unlogged() -> contextlib.AbstractContextManager[Any]:
    """Silence torch's log of operators that fail on fake tensors: the caller reports the reason."""
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN; the public ``torch.backends.mkldnn.flags`` also sets TF32, about which torch warns."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def replaced_generator(
    get: Callable[[], Any], restore: Callable[[Any], None], seed: Callable[[Any], Any]
) -> Iterator[None]:
    """Replace ``torch.get_rng_state``, ``torch.set_rng_state`` and ``torch.manual_seed``.

    ``torch.utils.checkpoint`` saves and restores the random state through these names; torch has no hook for a custom
    generator.
    """
    before = torch.get_rng_state, torch.set_rng_state, torch.manual_seed
    torch.get_rng_state, torch.set_rng_state, torch.manual_seed = get, restore, seed  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state, torch.manual_seed = before


@functools.cache
def decompositions(operators: tuple[Any, ...]) -> Mapping[Any, Callable[..., Any]]:
    """Return torch's decompositions of the operators; ``torch._decomp`` has no public name, and the lookup is slow."""
    return dict(get_decompositions(operators))


def inductor(
    graph: fx.GraphModule | Callable[..., tuple[Any, ...]],
    values: Sequence[Any],
    environment: SizeEnv | None = None,
    strides: Sequence[tuple[int, ...]] = (),
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a graph or function of plain operators, which may write to its inputs, with Inductor.

    ``torch.compile`` would trace the graph again and wrap each call in guards and autograd; its lower levels are
    private. Inductor caches compiled code on disk by the graph and all relevant settings.

    Args:
        graph: the graph or function.
        values: inputs of the graph; only shape, strides, dtype and device of tensors count. Symbolic sizes are inputs
            too: every symbol that occurs in a shape or in another size is one of them.
        environment: from :func:`zerograph._torch.sizes.separate_env` where there are symbolic sizes. It then has the
            conditions under which the compiled code is valid.
        strides: those of the outputs; (): as the trace has them.

    Returns:
        A function from a list of inputs, which it clears, to outputs. A symbolic size is an int at run time.
    """
    # These imports take seconds.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    sizes = environment or ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes)

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return in_env(sizes, value)
        shape, stride = ([in_env(sizes, size) for size in of] for of in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    function: Callable[..., Any] = fx.Interpreter(graph).run if isinstance(graph, fx.GraphModule) else graph
    if strides:
        function = _with_strides(function, strides)
    with mode:
        fakes = [fake(value) for value in values]
    with _size_oblivious() if environment is not None else contextlib.nullcontext():
        # Constants are fake as well: Inductor folds them itself, by their operators.
        with mode, torch.no_grad():
            traced = trace(torch.func.functionalize(function, remove="mutations"), fakes, select_decomp_table())
        output = traced.graph.output_node()
        # Code outside the graph relies on the strides that it was traced with.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
        with tracing, V.set_fake_mode(mode), torch.no_grad():
            compiled: Any = compile_fx_inner(traced, fakes, is_inference=True)

    # Outputs in another layout than asked for: Inductor of torch 2.11 returns a transposed copy of a view as the view.
    others: list[int] | None = None

    def run(inputs: list[Any]) -> Sequence[Any]:
        nonlocal others
        outputs: Sequence[Any] = compiled(inputs)
        if others is None:
            others = [number for number, stride in enumerate(strides) if not _has_stride(outputs[number], stride)]
        if others:
            outputs = list(outputs)
            for number in others:
                outputs[number] = _strided(outputs[number], strides[number])
        return outputs

    return run


def inductor_rounds_each_operator() -> bool:
    """Return whether code that Inductor compiles for the CPU rounds each sum and product, as torch's default does."""
    from torch._inductor import config

    return config.cpp.enable_floating_point_contract_flag == "off" and not config.cpp.enable_unsafe_math_opt_flag


def _with_strides(
    function: Callable[..., Sequence[Tensor]], strides: Sequence[tuple[int, ...]]
) -> Callable[..., list[Tensor]]:
    """Return the function with outputs of given strides: those of decomposed operators may differ."""

    def strided(*inputs: Any) -> list[Tensor]:
        outputs = zip(function(*inputs), strides, strict=True)
        return [output if output.stride() == stride else _strided(output, stride) for output, stride in outputs]

    return strided


def _strided(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy with these strides."""
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _has_stride(value: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether the strides of dimensions longer than 1 are these."""
    return all(size == 1 or own == other for size, own, other in zip(value.shape, value.stride(), stride, strict=True))


def _size_oblivious() -> contextlib.AbstractContextManager[Any]:
    """Answer a condition for which the general case is right too by the general case, not by the hint with a guard."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined,no-any-return]


def cache_folder() -> str:
    """Return Inductor's cache folder: ``TORCHINDUCTOR_CACHE_DIR``, or a folder of this user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def compiled_modules() -> tuple[type[nn.Module], ...]:
    """Return the class of modules from ``torch.compile``; it has no public name. Empty before its first use."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else (dynamo.OptimizedModule,)


def compiled_original(function: FunctionType) -> Any:
    """Return what ``torch.compile``, or its decorator that keeps Dynamo out, has wrapped; None for other functions."""
    # Decorators of the user copy the attribute.
    is_wrapper = function.__code__.co_filename.startswith(_DYNAMO)
    return getattr(function, "_torchdynamo_orig_callable", None) if is_wrapper else None


def is_inherited(cls: type, entry: Any) -> bool:
    """Return whether an entry of an optimizer's class is ``step()`` of a base, which the first instance puts there."""
    return getattr(entry, "hooked", False) and not entry.__qualname__.startswith(f"{cls.__qualname__}.")


def untagged(entry: Any) -> Any:
    """Return a method as it was before torch replaced it.

    Dynamo replaces methods of ``nn.Module`` on the first call of what it compiles, the first optimizer of a class its
    ``step()``.
    """
    if getattr(entry, "hooked", False):
        return entry.__wrapped__
    replaced = isinstance(entry, FunctionType) and entry.__module__ == "torch._dynamo.mutation_guard"
    return next(iter(inspect.getclosurevars(entry).nonlocals.values())) if replaced else entry
