"""Parameters of a module while their values are split between the ranks: shape and metadata, no computation."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base.source import warn_user
from zerograph.errors import SplitParameterError
from zerograph.runtime.tensor_hash import hash_bits


class GradientHolder(Protocol):
    """Holder of gradients that are not stored with their parameters, such as split ones."""

    def settle(self, parameter: nn.Parameter) -> None:
        """Store the gradient with the parameter, if it is held here."""

    def drop(self, parameter: nn.Parameter) -> None:
        """Drop the gradient, in whose place another is set, or none."""


# torch's own descriptors.
_STORED: Any = inspect.getattr_static(Tensor, "grad")
DATA: Any = inspect.getattr_static(Tensor, "data")

# By parameter. Weak references: a holder refers to its parameters.
_HOLDERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The parameters whose memory the user has in another tensor, by that tensor.
_READ: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Weak references to these tensors, by parameter. No attribute of it: that of a copy would be saved and copied with it.
_READ_FROM: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Hashes of these tensors, as they were when their parameter was split.
_LEFT: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Grad:
    """Descriptor of ``parameter.grad``: what holds a part of it stores it when it is read."""

    def __get__(self, parameter: nn.Parameter | None, owner: type | None = None) -> Any:
        if parameter is None:
            return _STORED
        settle_gradient(parameter)
        return _STORED.__get__(parameter)

    def __set__(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        for holder in _holders_of(parameter):
            holder.drop(parameter)
        _STORED.__set__(parameter, value)

    def __delete__(self, parameter: nn.Parameter) -> None:
        self.__set__(parameter, None)


class _Data:
    """Descriptor of ``parameter.data``: values that a loop assigns go where the parameter is stored.

    Graphs read that memory, and a parameter with the memory of a global tensor crashes torch. What was read before
    keeps its values, as it does where an assignment gives the parameter other memory.
    """

    def __get__(self, parameter: nn.Parameter | None, owner: type | None = None) -> Any:
        return DATA if parameter is None else _noted(parameter, DATA.__get__(parameter))

    def __set__(self, parameter: nn.Parameter, value: Tensor) -> None:
        if value is parameter:
            # As module.cpu() assigns on the CPU.
            return
        whole = getattr(value.detach(), "full_tensor", None)
        # Of a global tensor, a collective.
        value = value if whole is None else whole()
        is_plain = not isinstance(parameter, SplitParameter) and not _torch.active_modes()
        own = DATA.__get__(parameter) if is_plain else None
        read = _read_from(parameter)
        for one in read:
            # From here on it is a tensor of its own.
            del _READ[one]
            _LEFT.pop(one, None)
        _READ_FROM.pop(parameter, None)
        if own is None or (own.shape, own.dtype, own.device) != (value.shape, value.dtype, value.device):
            DATA.__set__(parameter, value)
            return
        store = getattr(parameter, "_zerograph_store", None)
        if store is None or not store.layout.is_whole:
            # A store takes its values from it. Two parameters may not share memory.
            DATA.__set__(parameter, value.clone(memory_format=torch.contiguous_format))
            return
        before = own.clone() if read else own
        for one in read:
            if one.data_ptr() == own.data_ptr():
                DATA.__set__(one, before)
        # What is assigned may be what was read.
        own.copy_(value)


def _detach(parameter: nn.Parameter) -> Tensor:
    return _noted(parameter, Tensor.detach(parameter))


def _noted(parameter: nn.Parameter, read: Tensor) -> Tensor:
    """Return a tensor that shares the memory of a parameter, and note it: it follows the parameter to other memory."""
    if not _torch.active_modes():
        _READ[read] = weakref.ref(parameter)
        _READ_FROM[parameter] = [*map(weakref.ref, _read_from(parameter)), weakref.ref(read)]
    return read


def _read_from(parameter: nn.Parameter) -> list[Tensor]:
    """Return the tensors that the user has, and that share the memory of a parameter."""
    return [one for reference in _READ_FROM.get(parameter, ()) if (one := reference()) is not None]


def parameters_read() -> list[nn.Parameter]:
    """Return the parameters whose memory the user has in other tensors too."""
    return [parameter for reference in list(_READ.values()) if (parameter := reference()) is not None]


def in_memory_read(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """Return values of a parameter in the memory that the user has in another tensor, of which there may be views."""
    for one in _read_from(parameter):
        own: Tensor = DATA.__get__(one)
        if (own.shape, own.dtype, own.device) == (values.shape, values.dtype, values.device) and own.is_contiguous():
            return own if own.data_ptr() == values.data_ptr() else own.copy_(values)
    return values


def changed_while_split(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return split parameters with the values of tensors that the user has read from them before, and changed since."""
    if not _LEFT:
        return []
    return [
        (parameter, read.detach().clone())
        for parameter in parameters
        if isinstance(parameter, SplitParameter)
        for read in _read_from(parameter)
        if read in _LEFT and _LEFT[read] != int(hash_bits(read.detach()))
    ]


def _holders_of(parameter: nn.Parameter) -> list[GradientHolder]:
    return [holder for reference in _HOLDERS.get(parameter, ()) if (holder := reference()) is not None]


def _with_holder(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a subclass of a parameter class whose ``grad`` asks holders: the same each time, kept in the class."""
    if issubclass(kind, SplitParameter) or isinstance(kind.__dict__.get("grad"), _Grad):
        return kind
    if "_zerograph_with_holder" in kind.__dict__:
        known: type[nn.Parameter] = kind.__dict__["_zerograph_with_holder"]
        return known
    names = {
        "grad": _Grad(),
        "data": _Data(),
        "detach": _detach,
        "_zerograph_holder": True,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    metaclass: Any = type(kind)
    subclass: type[nn.Parameter] = metaclass(kind.__name__, (kind,), names)
    kind._zerograph_with_holder = subclass  # type: ignore[attr-defined]
    return subclass


def hold_gradient_by(parameter: nn.Parameter, holder: GradientHolder) -> None:
    """Let ``parameter.grad`` ask a holder, to which a weak reference is kept."""
    holders = _holders_of(parameter)
    if any(one is holder for one in holders):
        return
    _HOLDERS[parameter] = [*map(weakref.ref, holders), weakref.ref(holder)]
    if isinstance(parameter, SplitParameter):
        plain = getattr(parameter, "_zerograph_plain_class", nn.Parameter)
        parameter._zerograph_plain_class = _with_holder(plain)  # type: ignore[attr-defined]
    else:
        parameter.__class__ = _with_holder(type(parameter))


def settle_gradient(parameter: nn.Parameter) -> None:
    """Store the gradient of which holders have parts. A collective if there are any."""
    for holder in _holders_of(parameter):
        holder.settle(parameter)


_IS_GRADIENT: Any = functools.partial(operator.is_not, None)


def stored_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that a plain ``backward()`` has given the parameter; holders are not asked."""
    with _torch.without_torch_function():
        gradient: Tensor | None = _STORED.__get__(parameter)
        return gradient


def stored_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return :func:`stored_gradient` of the parameters that have one."""
    with _torch.without_torch_function():
        parameters = list(parameters)
        found = [*map(_STORED.__get__, parameters)]
        # In C: loops ask in each step, when mostly none has one.
        return dict(itertools.compress(zip(parameters, found, strict=True), map(_IS_GRADIENT, found)))


def store_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Replace the gradient that :func:`stored_gradient` returns."""
    with _torch.without_torch_function():
        _STORED.__set__(parameter, gradient)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer in the order in which its ``state_dict()`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class SplitParameter(nn.Parameter):
    """A parameter whose values are split between the ranks. It has a shape, and computing with it is an error.

    :func:`hide` and :func:`show` change a parameter in place (``__class__``), so modules and optimizers keep their
    reference. Its storage is one element, expanded.

    Attributes:
        _zerograph_whole: makes it whole where something computes with it, a collective; its gradient is kept while it
            is split. None: computing with it is an error, and it has no gradient.
    """

    grad, data, detach = _Grad(), _Data(), _detach
    _zerograph_whole: Callable[[], object] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with _torch.without_torch_function():
                return func(*args, **(kwargs or {}))
        if func is torch.full_like:
            return _constant_like(*args, **(kwargs or {}))
        if func in _MOVES and isinstance(args[0], SplitParameter) and _stays(func, args, kwargs or {}):
            return args[0]
        makers = {one._zerograph_whole for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, SplitParameter)}
        if None not in makers:
            for make_whole in makers:
                make_whole()  # type: ignore[misc]
            return func(*args, **(kwargs or {}))
        raise SplitParameterError(
            f"{_name(func)} on a parameter whose values are split between the ranks\n{_advice(args)}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SplitParameter(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__torch_function__(nn.Parameter.__deepcopy__, (), (self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__torch_function__(nn.Parameter.__reduce_ex__, (), (self, protocol))


_MOVES = (
    *(Tensor.cpu, Tensor.cuda, Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    Tensor.contiguous,
)


def _stays(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a move leaves the parameter as it is; warn if it names another device.

    Libraries call ``module.cpu()`` at the end of training to free memory. The graph keeps its shards all the same.
    """
    parameter = args[0]
    sample = torch.empty((), dtype=parameter.dtype, device=parameter.device)
    moved = func(sample, *args[1:], **kwargs)
    if moved is sample:
        return True
    if moved.device.type in (sample.device.type, "meta") or moved.dtype is not sample.dtype:
        return False
    warn_user(
        f"a split parameter cannot move to {moved.device}: it stays on {sample.device}, where the graph keeps it\n"
        "step.full_parameters() and step.state_dict() give its values. Move the model before the graph is called."
    )
    return True


def _constant_like(parameter: Tensor, value: Any, **options: Any) -> Tensor:
    """Return one element, expanded. Adagrad creates its state with ``full_like`` when it is constructed."""
    dtype, device = options.get("dtype") or parameter.dtype, options.get("device") or parameter.device
    return torch.full((), value, dtype=dtype, device=device).expand(parameter.shape)


def _advice(args: Any) -> str:
    """Return what to do instead of computing with a split parameter."""
    split = next((argument for argument in args or () if isinstance(argument, SplitParameter)), None)
    if getattr(getattr(split, "_zerograph_store", None), "is_provisional", False):
        return (
            "By sharded_init() or load(), and no step has run yet: give it to a ZeroGraph. Its state_dict() and "
            "load_state_dict() use whole tensors, and 'with step.full_parameters():' gives whole parameters."
        )
    if hasattr(split, "_zerograph_loop"):
        return (
            "After zg.prepare() a call of the whole model, its state_dict() and load_state_dict() need nothing else. "
            "Use parameters, submodules and copies of the model inside 'with zg.full_parameters(model):', on all ranks."
        )
    return (
        "Use the module inside 'with step.full_parameters():', take step.state_dict(), load a plain state with "
        "step.load_state_dict({'modules': {'model': state}}), or compute in a ZeroGraph "
        "(of an engine: engine.full_parameters(), engine.state_dict(), and a penalty in the criterion)."
    )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name in ("__get__", "__set__") else f"{name}()"


def _accessors(accessor: str, *names: str) -> set[Any]:
    return {getattr(getattr(Tensor, name), accessor) for name in names}


# Functions that do not read the parameter's values.
METADATA: set[Any] = {
    *_accessors("__get__", "shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim", "layout", "grad_fn"),
    *_accessors("__get__", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_cpu", "is_mps", "is_xpu"),
    *_accessors("__get__", "itemsize", "nbytes"),
    *_accessors("__set__", "requires_grad", "grad"),
    *_accessors("__delete__", "grad"),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.ndimension,
    Tensor.element_size,
    Tensor.requires_grad_,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
    Tensor.__len__,
    _torch.COMPATIBLE_TYPES,
    Tensor.__hash__,
}


class HollowTensor(Tensor):
    """A tensor without values. It has a shape, and computing with it is an error.

    A tensor becomes one if the construction of its model failed, or if it shares memory with a parameter that was
    created split.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with _torch.without_torch_function():
                return func(*args, **(kwargs or {}))
        raise SplitParameterError(
            f"{_name(func)} on a tensor without values: sharded_init() failed, or the tensor shares memory with a "
            "parameter that was created split inside it\nCreate the model again, or use the parameter itself."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HollowTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def hollow_out(tensor: Tensor) -> None:
    """Free the tensor's memory in place. Its shape stays; computing with it is an error from then on."""
    DATA.__set__(tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape))
    tensor.__class__ = HollowTensor


def hide(parameter: nn.Parameter) -> None:
    """Turn a parameter into a split one in place: free its values, keep its shape."""
    if isinstance(parameter, SplitParameter):
        return
    with torch.no_grad():
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        DATA.__set__(parameter, nothing)
    if getattr(parameter, "_zerograph_whole", None) is None:
        # Not through the holders, which drop what they have.
        _STORED.__set__(parameter, None)
    for one in _read_from(parameter):
        _LEFT[one] = int(hash_bits(one.detach()))
    parameter._zerograph_plain_class = type(parameter)  # type: ignore[attr-defined]
    parameter.__class__ = SplitParameter


def show(parameter: nn.Parameter, values: Tensor) -> None:
    """Turn a split parameter into a plain one in place, with ``values`` as its data."""
    if isinstance(parameter, SplitParameter):
        parameter.__class__ = parameter._zerograph_plain_class  # type: ignore[attr-defined]
    DATA.__set__(parameter, values)
    for one in _read_from(parameter):
        DATA.__set__(one, values)
        _LEFT.pop(one, None)
