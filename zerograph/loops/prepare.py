"""``zg.prepare``: models, optimizers, schedulers and loaders of a training script, for all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, TypeVar, TypeVarTuple, overload
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zerograph import _torch
from zerograph.base.contexts import given
from zerograph.capture.wrappers import check_modules, held_optimizer
from zerograph.config import Config
from zerograph.errors import ConfigError, SplitParameterError
from zerograph.graph import ZeroGraph, building
from zerograph.ir.zero import DEFAULT_STAGE
from zerograph.loops.call_graph import ORIGIN
from zerograph.loops.containers import found_in
from zerograph.loops.loop import Loop
from zerograph.loops.loop_graph import LoopGraph
from zerograph.optim.step_hooks import check_step, state_methods
from zerograph.passes.context import GradientUse
from zerograph.runtime.parameters import SplitParameter, parameters_of, settle_gradient, stored_gradients
from zerograph.runtime.state import holds_state_of

One = TypeVar("One")
Several = TypeVarTuple("Several")
Stage = Literal[0, 1, 2, 3]
# Prepared modules are called as plain ones.
_plain: ContextVar[bool] = ContextVar("plain", default=False)


@overload
def prepare(one: One, /, *, stage: Stage | None = None, config: Config | None = None) -> One: ...


@overload
def prepare(*objects: *Several, stage: Stage | None = None, config: Config | None = None) -> tuple[*Several]: ...


def prepare(*objects: Any, stage: Stage | None = None, config: Config | None = None) -> Any:  # type: ignore[misc]
    """Prepare the objects of a training loop, and return them in the same order.

    Loaders yield global tensors, calls of prepared models run at once, and ``optimizer.step()`` runs one graph that
    updates by ``parameter.grad``. The numbers are those of the loop in one process on the whole batch.

    Args:
        objects: in any number and order: modules; optimizers of their parameters; schedulers of these optimizers;
            loaders, whose batches are split between the ranks; functions, such as a criterion, that see the whole
            batch.
        stage: the ZeRO stage, 1, 2 or 3, or 0 for no ZeRO. None: as ``config`` says; without ``config``
            stage 2.
        config: the options of the graphs. With ``stage`` a copy of it is used.

    Returns:
        The one object, or a tuple. Modules, optimizers and schedulers are the same objects, changed in place. Modules
        that are prepared already, as when a notebook's cell runs again, are prepared anew, if all modules are passed
        that were prepared together; optimizers that are not passed again cannot be used any more.

    Raises:
        ConfigError: an object is of another kind, prepared already, or belongs to one that is not prepared.
        CaptureError: an optimizer's update is no graph: LBFGS, SparseAdam.
    """
    if config is None:
        config, stage = Config(), DEFAULT_STAGE if stage is None else stage
    if not isinstance(config, Config):
        raise ConfigError(f"zg.prepare(config={config!r:.60}): give a zerograph.Config")
    if config.gradient_accumulation_steps != 1 or config.scaler is not None:
        raise ConfigError(
            "zg.prepare() takes no gradient_accumulation_steps and no grad_scaler\n"
            "Call backward() several times before optimizer.step(), and compute in bf16."
        )
    if stage is not None:
        config = copy.copy(config)
        config.zero.stage = stage
    modules = [one for one in objects if isinstance(one, nn.Module)]
    # A wrapper, such as SAM, runs as it is written: its step() calls that of the optimizer inside.
    wrappers = {one: held for one in objects if (held := held_optimizer(one)) is not None}
    optimizers = [wrappers.get(one, one) for one in objects if isinstance(one, torch.optim.Optimizer)]
    optimizers = list({id(one): one for one in optimizers}.values())
    _check(objects, modules, optimizers)
    _release_earlier(modules, optimizers)
    names = [f"model{number or ''}" for number in range(len(modules))]
    loop = Loop(dict(zip(names, modules, strict=True)), optimizers, config)
    for module in modules:
        _prepare_module(module, loop)
        loop.watch(module.parameters())
    for optimizer in optimizers:
        _prepare_optimizer(optimizer, loop)
    for wrapper, optimizer in wrappers.items():
        if type(wrapper).zero_grad is torch.optim.Optimizer.zero_grad:
            vars(wrapper)["zero_grad"] = vars(optimizer)["zero_grad"]
    loop.schedulers += [one for one in objects if isinstance(one, LRScheduler)]
    _replace_functions()
    replace_unscaling()
    prepared = tuple(_prepared(one, loop) for one in objects)
    return prepared[0] if len(prepared) == 1 else prepared


def _check(objects: Sequence[Any], modules: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    if not modules:
        raise ConfigError("zg.prepare() takes a model, and its optimizers, schedulers and loaders")
    for module in modules:
        loop = loop_of(module)
        if loop is not None and any(not any(one is other for one in modules) for other in loop.modules.values()):
            raise ConfigError(
                f"{type(module).__name__} is prepared already, together with another module: call zg.prepare() once, "
                "with all objects"
            )
        root = nn.Module()
        root.model = module
        check_modules(root)
    for optimizer in optimizers:
        check_step(optimizer)
        _check_parameters(optimizer, modules)
    for one in objects:
        owner = getattr(one, "optimizer", None)
        owner = held_optimizer(owner) or owner
        if isinstance(one, LRScheduler) and not any(owner is optimizer for optimizer in optimizers):
            raise ConfigError(f"{type(one).__name__} schedules an optimizer that is not prepared: pass it too")


def _check_parameters(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
    """Raise a ConfigError if the optimizer trains what is no parameter, or a parameter of another loop."""
    for parameter in parameters_of(optimizer):
        if not isinstance(parameter, nn.Parameter):
            raise ConfigError(
                f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is no parameter\n"
                "Make it a torch.nn.Parameter, or leave the optimizer out of zg.prepare(): every rank then runs it."
            )
        loop = getattr(parameter, "_zerograph_loop", None)
        if loop is None:
            continue
        others = [
            one for one in loop.modules.values() if loop_of(one) is loop and not any(one is own for own in modules)
        ]
        if others and any(parameter is one for member in loop.members.values() for one in member.parameters()):
            raise ConfigError(
                f"{type(optimizer).__name__} holds a parameter that is prepared already: pass all that belongs "
                "together to one zg.prepare()"
            )


def _release_earlier(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Release what was prepared in an earlier call, and refuse the optimizers of then that are not prepared again."""

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError(
            "this optimizer belongs to an earlier zg.prepare() of the model, which was prepared again without it\n"
            "Use the optimizer that was passed last, or pass all optimizers of the model together."
        )

    for loop in {id(loop): loop for module in modules if (loop := loop_of(module)) is not None}.values():
        release(*loop.modules.values(), *loop.optimizers)
        for optimizer in loop.optimizers:
            if not any(one is optimizer for one in optimizers):
                vars(optimizer)["step"] = vars(optimizer)["zero_grad"] = refuse


def _prepared(one: Any, loop: Loop) -> Any:
    if isinstance(one, (nn.Module, torch.optim.Optimizer, LRScheduler)):
        return one
    # iter() takes what has items by number, too.
    is_iterable = isinstance(one, Iterable) or hasattr(type(one), "__getitem__")
    if is_iterable and not isinstance(one, (Tensor, str, bytes, dict)):
        return loop.loader(one)
    if callable(one):
        return _called_by(one, loop)
    raise ConfigError(
        f"zg.prepare() got {one!r:.60}\n"
        "It takes modules, optimizers, schedulers, loaders, and functions such as a criterion."
    )


def _called_by(function: Callable[..., Any], loop: Loop) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _plain.get() or building():
            return function(*args, **kwargs)
        return loop.call(function, args, kwargs)

    return call


def _prepare_module(module: nn.Module, loop: Loop) -> None:
    """Give a module the class that answers its calls; it stays the same object."""
    kind: Any = type(module)

    @_torch.not_compiled
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module or _plain.get() or building():
            return kind.__call__(self, *args, **kwargs)
        return loop.call(self, args, kwargs)

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        loop.zero_grad_of(module.parameters(), set_to_none=set_to_none)

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        graph = loop.graph()
        if self is not module or args or kwargs or _plain.get() or loop.busy:
            return kind.state_dict(self, *args, **kwargs)
        with patch.object(loop, "busy", True), graph.gathered_parameters():
            return loop.copied(kind.state_dict(self, keep_vars=True))

    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        graph = loop.graph()
        if self is not module or loop.busy:
            return kind.load_state_dict(self, *args, **kwargs)
        with patch.object(loop, "busy", True), graph.full_parameters():
            return kind.load_state_dict(self, *args, **kwargs)

    def no_sync(self: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a block whose gradients are reduced once for each update, when they are read, at stages off and 1."""
        return patch.object(loop, "is_unsynced", new=True)  # type: ignore[return-value]

    def generate(self: nn.Module, *args: Any, **options: Any) -> Any:
        """Generate with gathered parameters, by the model's own loop."""
        if self is not module or _plain.get() or loop.busy:
            return kind.generate(self, *args, **options)
        with loop.graph().gathered_parameters(), given(_plain, True):
            return kind.generate(self, *args, **options)

    def plainly(self: nn.Module, copying: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Copy as a module of the original class, which no loop knows."""
        graph = loop.graph() if self is module and not (_plain.get() or building()) else None
        if graph is not None and any(isinstance(one, SplitParameter) for one in self.parameters()):
            with graph.gathered_parameters(), given(_plain, True):
                return plainly(self, copying)
        prepared, self.__class__ = type(self), kind
        try:
            return copying(self)
        finally:
            self.__class__ = prepared

    def refuse_pickling(self: nn.Module, protocol: Any) -> Any:
        raise ConfigError(
            f"a {kind.__name__} that zg.prepare() has prepared cannot be pickled: it holds the graph of its loop\n"
            "Save model.state_dict(); or, inside 'with zg.full_parameters(model):', copy.deepcopy(model)."
        )

    methods: dict[str, Any] = {
        "__copy__": lambda self: plainly(self, copy.copy),
        "__deepcopy__": lambda self, memo: plainly(self, lambda one: copy.deepcopy(one, memo)),
        "__reduce_ex__": refuse_pickling,
        **({"generate": generate} if hasattr(kind, "generate") else {}),
        "no_sync": no_sync,
        "__call__": call,
        "zero_grad": zero_grad,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_zerograph_prepared": loop}

    def changing(name: str) -> Callable[..., None]:
        change = getattr(type(kind), name)
        return lambda cls, *args: change(kind if cls is type(module) else cls, *args)

    # What a call writes to its class is for all models of the class, and stays.
    meta = type("Prepared", (type(kind),), {name: changing(name) for name in ("__setattr__", "__delattr__")})
    module.__class__ = meta(kind.__name__, (kind,), {**methods, **names})


def loop_of(module: nn.Module) -> Loop | None:
    """Return the loop that a module is prepared for, or None."""
    loop: Loop | None = getattr(type(module), "_zerograph_prepared", None)
    return loop


@contextlib.contextmanager
def full_parameters(module: nn.Module, *, modifier_rank: int | None = None) -> Iterator[None]:
    """Make the parameters of a prepared module whole inside the block, and its calls ordinary ones. Keep changes.

    For what computes with parameters between steps, such as a moving average of weights:
    ``with zg.full_parameters(model): averaged.update_parameters(model)``. A collective: every rank enters the block,
    and makes the same changes. All modules that were prepared together are whole, and so is ``optimizer.state``.

    Args:
        module: a prepared module.
        modifier_rank: the rank whose parameters and buffers all ranks get at the end, as for
            ``if zg.rank() == 0: init(model)``. None: every rank makes the same changes.

    Raises:
        ConfigError: the module is not prepared.
        RankMismatchError: ranks have made other changes. None is kept.
    """
    loop = loop_of(module)
    if loop is None:
        raise ConfigError(f"zg.full_parameters() of a {type(module).__name__} that zg.prepare() has not prepared")
    graph = loop.graph()
    with patch.object(loop, "busy", True), graph.full_parameters(modifier_rank=modifier_rank), given(_plain, True):
        yield


def step_of(prepared: nn.Module | torch.optim.Optimizer, *others: torch.optim.Optimizer) -> ZeroGraph:
    """Return the graph of a prepared module's last training call, or of the updates of optimizers.

    To look at it: ``zg.step_of(model).inspect.report("step.html")``, ``zg.step_of(optimizer).inspect.memory``. To save
    and load the loop's modules and these optimizers in parts: ``zg.step_of(optimizer).save(folder)``.

    Args:
        prepared: a prepared module or optimizer.
        others: further optimizers of the same loop.

    Raises:
        ConfigError: it is not prepared, or there is no such graph yet: the first call of each kind runs operator by
            operator.
    """
    graph: ZeroGraph | None = None
    if isinstance(prepared, nn.Module):
        loop = loop_of(prepared)
        graph = None if loop is None else loop.calls.latest.get(prepared)
    else:
        parameters = parameters_of(prepared) if isinstance(prepared, torch.optim.Optimizer) else ()
        loop = next((getattr(one, "_zerograph_loop", None) for one in parameters), None)
        graph = None if loop is None else loop.graph(prepared, *others)
    if graph is None:
        raise ConfigError(
            f"zg.step_of() of a {type(prepared).__name__} "
            + ("that zg.prepare() has not prepared" if loop is None else "no training call of which is a graph yet")
        )
    return graph


def release(*objects: nn.Module | torch.optim.Optimizer) -> None:
    """Make prepared modules and optimizers plain ones again, so that they can be prepared with others.

    Parameters and state stay sharded. Gradients are whole. A collective.
    """
    for one in objects:
        if isinstance(one, nn.Module):
            if (loop := loop_of(one)) is not None:
                # The next loop does not know what is whole, or waits, in this one.
                loop.graph()
                one.__class__ = type(one).__bases__[0]
        else:
            for name in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", "__reduce_ex__"):
                vars(one).pop(name, None)
            for parameter in parameters_of(one):
                vars(parameter).pop("_zerograph_opens", None)
                # The next loop does not know of a split one.
                settle_gradient(parameter)


def _prepare_optimizer(optimizer: Any, loop: Loop) -> None:
    """Replace the methods of an optimizer that the loop calls."""
    plain: Any = type(optimizer)

    def step(closure: Callable[[], Any] | None = None) -> Any:
        if _only_creates_state(optimizer, loop):
            plain.step(optimizer)
            return None
        return step_scaled(loop, optimizer, closure)

    def zero_grad(set_to_none: bool = True) -> None:
        loop.zero_grad_of(parameters_of(optimizer), set_to_none=set_to_none)

    def add_param_group(group: dict[str, Any]) -> None:
        loop.graph()
        before = len(optimizer.param_groups)
        plain.add_param_group(optimizer, group)
        try:
            _check_parameters(optimizer, [*loop.modules.values()])
        except BaseException:
            del optimizer.param_groups[before:]
            raise
        loop.adopt(optimizer)

    def storing(_: str) -> ZeroGraph | None:
        graph = loop.graph(optimizer)
        return graph if holds_state_of(optimizer) else None

    def reduce_plain(protocol: Any) -> Any:
        """Copy or pickle the optimizer while it holds its own state; later only ``state_dict()`` has the state."""
        if not holds_state_of(optimizer):
            loop.graph(optimizer)
        if holds_state_of(optimizer):
            raise SplitParameterError(
                f"{plain.__name__} is copied or pickled, but its state is stored in the graph of its loop\n"
                "Save or copy optimizer.state_dict(), on all ranks; a new optimizer loads it with load_state_dict()."
            )
        return plain.__reduce_ex__(optimizer, protocol)

    # Schedulers look for the mark of their own wrapper.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    for method in (step, zero_grad, add_param_group, *state_methods(optimizer, storing)):
        vars(optimizer)[method.__name__] = method
    vars(optimizer)["__reduce_ex__"] = reduce_plain
    loop.adopt(optimizer)


def _only_creates_state(optimizer: torch.optim.Optimizer, loop: Loop) -> bool:
    """Return whether a step on zero gradients at rate 0 creates the optimizer's state, as torch's checkpoints do."""
    if any(group.get("lr") != 0 for group in optimizer.param_groups) or loop.waits_for_step():
        return False
    parameters = _torch.trained(parameters_of(optimizer))
    gradients = stored_gradients(parameters).values()
    if not gradients or len(gradients) < len(parameters) or holds_state_of(optimizer):
        return False
    return not any(bool(gradient.any()) for gradient in gradients)


@functools.cache
def _replace_functions() -> None:
    """Replace torch's functions that clip or compute gradients by those that know prepared parameters and calls."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(nn.utils, name)
        _torch.replace_function(original, _clipping(original), sys.modules)
    _torch.replace_function(torch.autograd.grad, _by_origins(torch.autograd.grad), sys.modules)


def _by_origins(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.autograd.grad`` that takes results of calls for the tensors which others have come from."""

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        several = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        origins = [vars(one).get(ORIGIN) if isinstance(one, Tensor) else None for one in several]
        several = [one if origin is None else origin() for one, origin in zip(several, origins, strict=True)]
        return original(outputs, several, *args, **kwargs)

    return grad


def _clipping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        loops = {id(loop): loop for one in parameters if (loop := getattr(one, "_zerograph_loop", None)) is not None}
        if not loops or _plain.get() or building():
            return original(parameters, *args, **kwargs)
        call = inspect.signature(original).bind(parameters, *args, **kwargs)
        # A frozen parameter may have a gradient of before.
        parameters = [
            one for one in parameters if one.requires_grad or any(loop.has_gradient(one) for loop in loops.values())
        ]
        is_of_others = any(getattr(one, "_zerograph_loop", None) is None for one in parameters)
        if len(loops) > 1 or is_of_others or call.arguments.get("error_if_nonfinite"):
            return original(parameters, *args, **kwargs)
        (loop,) = loops.values()
        return loop.edit(original, parameters, dict(list(call.arguments.items())[1:]))

    return clip


class WholeStep(LoopGraph):
    """A training step that calls a prepared module once: the call, its backward, and the update.

    The loop's own lines are not known. The loss is that of the module, else the mean square of its results.

    Args:
        module: a prepared module.

    Raises:
        ConfigError: the module is not prepared.
    """

    gradients: ClassVar[GradientUse] = "update"

    def __init__(self, module: nn.Module) -> None:
        loop = loop_of(module)
        if loop is None:
            raise ConfigError(f"a {type(module).__name__} that zg.prepare() has not prepared has no step")
        super().__init__(loop.members, loop.optimizers, loop.config)
        self._name = next(name for name, one in loop.modules.items() if one is module)

    def build(self, *args: Any) -> Tensor:
        """Call the module; run backward from its losses."""
        results = [one for one in found_in(getattr(self, self._name)(*args), Tensor) if one.requires_grad]
        losses = [one for one in results if not one.dim()] or [one.square().mean() for one in results]
        if not losses:
            raise ConfigError(f"no result of {self._name} has a gradient: prepare it with its optimizer")
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss


def step_scaled(loop: Loop, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Make an update as ``GradScaler.step()`` asks for it.

    Of a fused optimizer it does not unscale the gradients: it leaves the scale and the overflow flag as attributes.
    """
    own = vars(optimizer)
    flags: dict[str, Any] = {name: own.pop(name) for name in ("found_inf", "grad_scale") if name in own}
    found, scale = flags.get("found_inf"), flags.get("grad_scale")
    # Without them while the update is traced: it does not unscale.
    try:
        if found is not None and found.item():
            _torch.mark_step_called(optimizer)
            return None
        if scale is not None:
            loop.unscale(optimizer, scale.double().reciprocal().float())
        return loop.step(optimizer, closure)
    finally:
        own.update(flags)


@functools.cache
def replace_unscaling() -> None:
    """Let ``GradScaler`` unscale the gradients of prepared optimizers without gathering them."""
    _torch.replace_unscaling(_unscale)


def _unscale(optimizer: torch.optim.Optimizer, inverse: Tensor) -> Tensor | None:
    """Unscale the gradients of a prepared optimizer; return the overflow flag, or None for any other optimizer."""
    parameters = parameters_of(optimizer)
    loop: Loop | None = getattr(parameters[0], "_zerograph_loop", None) if parameters else None
    if loop is None:
        return None
    # Not of the default dtype, which may be fp64.
    return torch.full((), not loop.unscale(optimizer, inverse), dtype=torch.float32, device=inverse.device)
