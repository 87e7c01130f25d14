"""The private torch API that zerograph needs, and nothing else: one wrapper each, with the reason.

Supported: torch 2.11 to 2.13. When torch moves, this is the only file to look at.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import graph as autograd_graph
from torch.distributed import distributed_c10d
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.utils import clip_grad
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree  # torch.export's rules for nested values, and what users registered with it
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "OpOverload",
    "TorchDispatchMode",
    "adaptive_output",
    "all_gather",
    "annotated",
    "backward_by",
    "backward_sequence_number",
    "cache_folder",
    "causal_masks_unread",
    "checkpoints_kept",
    "closed_rates",
    "compiled_modules",
    "compiling",
    "decompositions",
    "errors_unlogged",
    "examples",
    "fake_mode",
    "forward_sequence_number",
    "functional_form",
    "functional_trace",
    "generator_replaced",
    "gradient_hooks",
    "graph_module",
    "has_closed_rates",
    "in_place_form",
    "inductor",
    "is_mutable",
    "made_again",
    "made_at_construction",
    "mark_step_called",
    "module_hooks",
    "negated",
    "no_modes",
    "objects_sent_by",
    "overloads",
    "plain_tensors",
    "preserved_metadata",
    "process_group",
    "pytree",
    "register_works",
    "returns",
    "schema_arguments",
    "single_process_store",
    "step_hooks",
    "storage_key",
    "tensor_without_data",
    "total_norm_by",
    "trace",
    "unhooked_step",
    "version",
    "viewed_arguments",
    "with_tensors",
    "without_onednn",
    "without_torch_function",
    "written_arguments",
    "written_tensors",
]


def _describe_fused_updates() -> torch.library.Library:
    """Tell torch what fused updates return: nothing. It knows of a few.

    For the others fake tensors run the kernel itself on zeros as large as they stand for; on CUDA on our step counts,
    which lie elsewhere, and which it would read there without a look.
    """
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        for overload in getattr(torch.ops.aten, name).overloads():
            full = name if overload == "default" else f"{name}.{overload}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "Meta"):
                library.impl(full, lambda *args, **kwargs: None)
    return library


# The registrations live as long as this does.
_fused_updates = _describe_fused_updates()


class Known(FakeTensorMode):
    """A fake mode that remembers results: ``known`` is by operator and arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[Any, Any] = {}


def fake_mode() -> Known:
    """Tensors with shape and dtype but no data. The shape environment lets ``lr.item()`` of an update be a node."""
    return Known(shape_env=ShapeEnv(allow_scalar_outputs=True), allow_non_fake_inputs=True)


def examples(values: Sequence[Tensor]) -> list[Tensor]:
    """Fake tensors like ``values`` in a mode of their own: the graph's has seen symbols that compilers stumble over."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        return [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in values]


def trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    decomposition_table: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """``make_fx`` over fake arguments: the only tracer that runs real autograd and real optimizers whole."""
    tracer = make_fx(
        function,
        dict(decomposition_table or {}),
        # Constants that a model makes (masks, tables of positions) are real tensors among fake ones.
        _allow_non_fake_inputs=True,
        # item() in build() is refused by our own mode, with the user's line; the optimizer's lr may be one.
        _error_on_data_dependent_ops=False,
    )
    with _use_lazy_graph_module(True):
        return tracer(*arguments)


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """``fx.GraphModule(root, graph)`` that writes its Python code when somebody asks: for graphs in the making."""
    with _use_lazy_graph_module(True):
        module: fx.GraphModule = _make_graph_module(root, graph)
    return module


def functional_trace(graph: fx.GraphModule, arguments: Sequence[Any]) -> fx.GraphModule:
    """Trace an already captured graph again without mutation; writes to arguments stay, as final ``copy_`` nodes.

    ``torch.func.functionalize`` refuses a ``backward()`` inside, so this is a second pass over plain operators.
    """
    with fx_traceback.preserve_node_meta(), torch.no_grad():
        return trace(torch.func.functionalize(fx.Interpreter(graph).run, remove="mutations"), arguments)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true: optimizers and models then take their traceable branches."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def generator_replaced(
    get: Callable[[], Any], restore: Callable[[Any], None], seed: Callable[[Any], Any]
) -> Iterator[None]:
    """Put functions in place of ``torch.get_rng_state``, ``set_rng_state`` and ``manual_seed``.

    ``torch.utils.checkpoint`` keeps and restores what it takes for the state of all random numbers through these
    names; torch has no hook for a generator of one's own.
    """
    before = torch.get_rng_state, torch.set_rng_state, torch.manual_seed
    torch.get_rng_state, torch.set_rng_state, torch.manual_seed = get, restore, seed  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state, torch.manual_seed = before


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Neither a trace nor a fake mode in force inside: for a trace of its own within another one."""
    return _disable_current_modes()


def preserved_metadata() -> contextlib.AbstractContextManager[None]:
    """Nodes made inside carry what ``annotated`` says of them, also through a second trace."""
    return fx_traceback.preserve_node_meta()


def has_fractions(tensor: Tensor) -> bool:
    """Whether its elements are floating or complex numbers: others are finite."""
    return tensor.is_floating_point() or tensor.is_complex()


def annotated(values: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Nodes made inside get ``values`` in ``node.meta["custom"]``, the one field of ours that fx copies along."""
    return fx_traceback.annotate(values)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN inside; the public ``torch.backends.mkldnn.flags`` also sets TF32, and torch warns of that."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def forward_sequence_number() -> int:
    """Number of the autograd node that the running forward operator made last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


@contextlib.contextmanager
def backward_by(run: Callable[..., None]) -> Iterator[None]:
    """Inside, ``Tensor.backward`` and ``torch.autograd.backward`` call ``run(original, tensors, ...)``.

    The former looks the latter up in its module at each call: there is no hook around all of a backward.
    """
    original = torch.autograd.backward
    running = False

    def replaced(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal running
        if running:
            # The original hands itself, by its name, to modes and subclasses, which call it again.
            original(tensors, *args, **kwargs)
            return
        running = True
        try:
            run(original, tensors, *args, **kwargs)
        finally:
            running = False

    with patch.object(torch.autograd, "backward", replaced):
        yield


def backward_sequence_number() -> int | None:
    """Number of the autograd node whose backward is running: that of its forward operator; None in forward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


@contextlib.contextmanager
def checkpoints_kept() -> Iterator[None]:
    """Let selective contexts of ``torch.utils.checkpoint`` keep what their policy says, and compute the rest again.

    Under any tracer they would keep everything, and leave it to torch's own partitioner to read the policy off nodes.
    """
    with patch.object(checkpointing, "_is_compiling", lambda *_: False):
        yield


def made_again() -> list[nn.Module] | None:
    """The modules that ``torch.utils.checkpoint`` is calling again for the backward that runs, innermost first.

    None if it calls nothing; no module where it calls plain functions. Nothing tells but the stack: inside of the frame
    that runs autograd's engine there is one of checkpoint's, and module hooks are not told that it stops halfway.
    """
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        if frame.f_code.co_filename == checkpointing.__file__:
            return found
        frame = frame.f_back
    return None


_CALL = nn.Module._call_impl.__code__
_ENGINE = autograd_graph._engine_run_backward.__code__


def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
    """``module`` with ``tensors`` in place of its parameters and buffers, by qualified name, restored at exit.

    ``torch.func.functional_call`` does the same around one ``forward``; ``build()`` is not one.
    """
    context: contextlib.AbstractContextManager[None] = _reparametrize_module(module, tensors)
    return context


@contextlib.contextmanager
def total_norm_by(function: Callable[[Sequence[Tensor], float, bool], Tensor | None]) -> Iterator[None]:
    """``clip_grad_norm_`` and ``get_total_norm`` ask ``function(tensors, p, error_if_nonfinite)`` for the norm.

    Where it returns None they compute it themselves. ``clip_grad_norm_`` looks the function up by a private name; a
    ``get_total_norm`` that was imported by name before keeps its own loop, which is right, but no single node.
    """
    original = clip_grad._get_total_norm

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with torch.no_grad():
            found = function(given, float(norm_type), error_if_nonfinite)
        return original(given, norm_type, error_if_nonfinite, foreach) if found is None else found

    public = nn.utils.get_total_norm
    clip_grad._get_total_norm = nn.utils.get_total_norm = total_norm
    try:
        yield
    finally:
        clip_grad._get_total_norm, nn.utils.get_total_norm = original, public


@functools.cache
def decompositions(operators: tuple[Any, ...]) -> Mapping[Any, Callable[..., Any]]:
    """torch's own decompositions of the named operators (``torch._decomp`` has no public name, and takes its time)."""
    return dict(get_decompositions(operators))


def inductor(graph: fx.GraphModule, values: Sequence[Tensor]) -> Callable[..., Sequence[Any]]:
    """Inductor on a graph of plain operators that may write to its inputs: a function from inputs to outputs.

    ``torch.compile`` would trace it once more, and wrap each call in guards and autograd: what is below it is private.
    Inductor keeps what it compiled on disk, by the graph and all settings that matter, and finds it there again.
    """
    # Seconds to import: only for those who use it.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        examples = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device) for value in values
        ]
    # Constants are fake as well: Inductor shall fold them itself, by their operators.
    with mode, torch.no_grad():
        traced = trace(
            torch.func.functionalize(fx.Interpreter(graph).run, remove="mutations"), examples, select_decomp_table()
        )
    output = traced.graph.output_node()
    # What is outside of the graph counts on the strides that it was traced with.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    with torch._guards.tracing(torch._guards.TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
        compiled: Any = compile_fx_inner(traced, examples, is_inference=True)

    def run(*inputs: Tensor) -> Sequence[Any]:
        outputs: Sequence[Any] = compiled(list(inputs))
        return outputs

    return run


def cache_folder() -> str:
    """Where Inductor keeps what it compiled: ``TORCHINDUCTOR_CACHE_DIR``, or a folder of this user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def compiled_modules() -> tuple[type[nn.Module], ...]:
    """Return the class of what ``torch.compile(module)`` returns, which has no public name; none before it was used."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else (dynamo.OptimizedModule,)


# Asked by ``Module._apply`` about each parameter; says something about types only.
COMPATIBLE_TYPES = torch._has_compatible_shallow_copy_type


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Treat tensors of a subclass as plain ones inside: how the subclass itself reads their metadata."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def plain_tensors() -> contextlib.AbstractContextManager[None]:
    """Neither subclasses nor torch function modes see what is called inside."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def storage_key(storage: torch.UntypedStorage) -> int:
    """Equal for storages that are the same memory; unique as long as somebody holds on to it."""
    return int(storage._cdata)


def negated(tensor: Tensor) -> Tensor:
    """A view with the bit that says "negative" set, as the imaginary part of a conjugate has it."""
    found: Tensor = torch._neg_view(tensor)
    return found


@contextlib.contextmanager
def errors_unlogged() -> Iterator[None]:
    """Operators that fail on fake tensors are not logged inside, with a traceback each: the caller says why."""
    with patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
        yield


def tensor_without_data(
    cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, requires_grad: bool
) -> Any:
    """A tensor of the subclass ``cls`` that has a shape, a dtype and a device, and no values."""
    make: Callable[..., Any] = Tensor._make_wrapper_subclass
    return make(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


Hooks = list[Callable[..., Any]]


def gradient_hooks(leaves: Iterable[Tensor]) -> list[tuple[Hooks, Hooks]]:
    """Of each leaf the hooks on its gradient, and those behind its accumulation: no public name leads to them.

    To be read of parameters without values, too.
    """
    with plain_tensors():
        found = [(leaf._backward_hooks, leaf._post_accumulate_grad_hooks) for leaf in leaves]
    return [(list((first or {}).values()), list((behind or {}).values())) for first, behind in found]


def has_gradient_hooks(leaves: Iterable[Tensor]) -> bool:
    """Return whether :func:`gradient_hooks` has any to name."""
    with plain_tensors():
        return any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves)


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What is called around the module's forward and backward; torch can only add to it and take away."""
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return [hook for kind in kinds if kind for hook in kind.values()]


def contents_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """What a module holds parameters, buffers, other modules and :func:`module_hooks` in."""
    return module._parameters, module._buffers, module._modules, *hooks_in(module)


def hooks_in(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the dicts that hold the :func:`module_hooks`."""
    forward: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    return *forward, module._backward_pre_hooks, module._backward_hooks


def version(tensor: Tensor) -> int:
    """How often the tensor has been written to in place."""
    return int(tensor._version)


def made_at_construction(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """The state that ``step()`` expects to find at first: torch 2.11's Adagrad makes it with the optimizer."""
    if not isinstance(optimizer, torch.optim.Adagrad) or not torch.__version__.startswith("2.11."):
        return {}
    total = torch.full_like(parameter, optimizer.defaults["initial_accumulator_value"])
    return {"step": torch.tensor(0.0), "sum": total}


def schema_arguments(operator: OpOverload) -> Sequence[Any]:
    """The operator's declared arguments: name, type, default_value."""
    return list(operator._schema.arguments)


def returns(operator: OpOverload) -> Sequence[Any]:
    """The operator's declared results: type."""
    return list(operator._schema.returns)


def is_mutable(operator: OpOverload) -> bool:
    """Whether the operator writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values the node's operator writes to, by its schema."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    found: list[fx.Node] = []
    fx.map_arg(_aliased(node.target, node.args, node.kwargs, written=True), found.append)
    return found


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes in whose memory the node's result may lie, by its operator's schema; not those that it writes to."""
    if not isinstance(node.target, OpOverload):
        return []
    found: list[fx.Node] = []
    fx.map_arg(_aliased(node.target, node.args, node.kwargs, written=False), found.append)
    return found


def written_tensors(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of the operator writes to, by its schema."""
    found: list[Tensor] = []
    for given in _aliased(operator, args, kwargs, written=True):
        found += [one for one in (given if isinstance(given, (list, tuple)) else [given]) if one is not None]
    return found


def _aliased(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, written: bool) -> list[Any]:
    """What is given for those arguments whose memory the operator writes to, or else may return."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write == written
    ]


def unwrapped(operator: OpOverload) -> Callable[..., Any]:
    """What an operator calls with its arguments and nothing else: half of what calling a small one takes is before."""
    call: Callable[..., Any] = operator._op
    return call


def overloads(operator: Any) -> list[OpOverload]:
    """The overloads of what users call an operator: one itself, a packet, what ``custom_op`` returned, or a name.

    ``torch.library.custom_op`` keeps its overload under a private name. Empty for anything else.
    """
    if isinstance(operator, str) and "::" in operator:
        namespace, name = operator.split("::", 1)
        operator = getattr(getattr(torch.ops, namespace), name.split(".")[0], None)
    operator = getattr(operator, "_opoverload", operator)
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    return []


def in_place_form(operator: OpOverload) -> OpOverload | None:
    """``aten.pow_.Scalar`` for ``aten.pow.Tensor_Scalar``: what takes the same arguments and writes to the first.

    None where nothing does.
    """
    return next(_taking_the_same(operator, f"{_name(operator)}_"), None)


def functional_form(operator: OpOverload) -> OpOverload | None:
    """``aten.pow.Tensor_Scalar`` for ``aten.pow_.Scalar``: what takes the same arguments and makes a tensor of its own.

    None where nothing does.
    """
    name = _name(operator)
    if not name.endswith("_"):
        return None
    for form in _taking_the_same(operator, name.removesuffix("_")):
        if not (form._schema.is_mutable or any(one.alias_info is not None for one in form._schema.returns)):
            return form
    return None


def _name(operator: OpOverload) -> str:
    return operator._schema.name.removeprefix("aten::")


def _taking_the_same(operator: OpOverload, name: str) -> Iterator[OpOverload]:
    """The overloads of aten's ``name`` with the operator's arguments; two forms of one have other overload names."""
    takes = [(one.name, str(one.type)) for one in operator._schema.arguments]
    for form in [] if ":" in name else overloads(getattr(torch.ops.aten, name, None)):
        if [(one.name, str(one.type)) for one in form._schema.arguments] == takes:
            yield form


def mark_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the update ran: they warn when they are stepped before the optimizer."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """What is to run before ``step()``, and behind it, of this optimizer and of all: no public name leads to it."""
    ours, everybodys = vars(optimizer), vars(sys.modules[torch.optim.Optimizer.__module__])
    before = [*everybodys["_global_optimizer_pre_hooks"].values(), *ours["_optimizer_step_pre_hooks"].values()]
    behind = [*ours["_optimizer_step_post_hooks"].values(), *everybodys["_global_optimizer_post_hooks"].values()]
    return before, behind


def tables_of_hooks_before_step(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the hooks before ``step()``, of all optimizers and of this one."""
    everybodys = vars(sys.modules[torch.optim.Optimizer.__module__])
    return everybodys["_global_optimizer_pre_hooks"], vars(optimizer)["_optimizer_step_pre_hooks"]


def has_closed_rates(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Tell whether :func:`closed_rates` knows the scheduler."""
    return isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or hasattr(scheduler, "_get_closed_form_lr")


def closed_rates(scheduler: torch.optim.lr_scheduler.LRScheduler) -> list[Any]:
    """The rates that follow from ``base_lrs`` and ``last_epoch`` alone: public ``get_lr()`` goes on from the last."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        rates = [f(scheduler.last_epoch) for f in scheduler.lr_lambdas]
        return [base * rate for base, rate in zip(scheduler.base_lrs, rates, strict=True)]
    return list(scheduler._get_closed_form_lr())  # type: ignore[attr-defined]


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The class's ``step()`` without what torch puts around it once one of the class was made.

    That runs hooks and a profiler's range, which a subclass's own ``step()`` has around it already.
    """
    step: Any = kind.step
    plain: Callable[[torch.optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Shards end to end into ``whole``: torch 2.13 renamed the function and warns about the old name."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(whole, shard, group=group)


def objects_sent_by(refuse: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Replace the function by which every collective of Python objects begins: their names may be imported anywhere."""
    return patch.object(distributed_c10d, "_object_to_tensor", refuse)


def process_group(name: str) -> dist.ProcessGroup:
    """The group that operators of a graph know by its name; torch's own collectives look it up the same way."""
    resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def register_works(tensor: Tensor, works: Sequence[dist.Work]) -> None:
    """Let ``_c10d_functional.wait_tensor(tensor)`` wait for ``works``, in order: only C++ may call this publicly."""
    for work in works:
        torch._C._distributed_c10d._register_work(tensor, work)


def single_process_store() -> Any:
    """A store without a socket, so that one process needs no address and no free port (untyped in torch)."""
    return dist.HashStore()  # type: ignore[attr-defined]


def causal_masks_unread() -> contextlib.AbstractContextManager[Any]:
    """nn.Transformer compares a mask's values with a causal one's to find a faster kernel: it shall take our word."""
    return patch.object(
        torch.nn.modules.transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)
    )


def adaptive_output(output: Tensor, loss: Tensor) -> Any:
    """What AdaptiveLogSoftmaxWithLoss returns; its class is in a private module."""
    return torch.nn.modules.adaptive._ASMoutput(output, loss)
