"""Schemas and overloads of operators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.triton import triton_ops_to_kernels
from torch._ops import OpOverload, OpOverloadPacket


@functools.cache
def schema_arguments(operator: OpOverload) -> Sequence[Any]:
    """Return the operator's declared arguments; each has name, type and default_value."""
    return tuple(operator._schema.arguments)


def has_kernel(operator: OpOverload) -> bool:
    """Return whether torch's dispatcher knows the operator: functions of TorchScript's interpreter have no kernel.

    There is no public way to ask.
    """
    return bool(torch._C._dispatch_has_kernel(operator._name))


def returns(operator: OpOverload) -> Sequence[Any]:
    """Return the operator's declared results; each has a type."""
    return list(operator._schema.returns)


def is_mutable(operator: OpOverload) -> bool:
    """Return True if the operator writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def is_composite(operator: OpOverload) -> bool:
    """Return True if torch defines the operator by others, below autograd too."""
    return bool(operator._can_decompose())


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values the node writes to, by its operator's schema."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    return _aliased_nodes(node, written=True)


def viewed_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that the node's result may alias, by its operator's schema, without those that it writes to."""
    return _aliased_nodes(node, written=False) if isinstance(node.target, OpOverload) else []


def _aliased_nodes(node: fx.Node, *, written: bool) -> list[fx.Node]:
    assert isinstance(node.target, OpOverload)
    nodes: list[fx.Node] = []
    fx.map_arg(_aliased(node.target, node.args, node.kwargs, written=written), nodes.append)
    return nodes


def written_tensors(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of the operator writes to, by its schema."""
    tensors: list[Tensor] = []
    for value in _aliased(operator, args, kwargs, written=True):
        values = value if isinstance(value, (list, tuple)) else [value]
        tensors += [tensor for tensor in values if tensor is not None]
    return tensors


def _aliased(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, written: bool) -> list[Any]:
    """Return the arguments that the operator writes to (``written``), or those that its result may alias."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write == written
    ]


def unwrapped(operator: OpOverload) -> Callable[..., Any]:
    """Return the function that an overload calls; calling it directly halves the overhead of a small operator."""
    call: Callable[..., Any] = operator._op
    return call


def overloads(operator: Any) -> list[OpOverload]:
    """Return the overloads of an operator.

    Args:
        operator: an overload, a packet, the result of ``torch.library.custom_op`` (which keeps its overload under a
            private name), or a name such as ``"aten::mm"``.

    Returns:
        The overloads; empty for anything else.
    """
    if isinstance(operator, str) and "::" in operator:
        namespace, name = operator.split("::", 1)
        operator = getattr(getattr(torch.ops, namespace), name.split(".")[0], None)
    operator = getattr(operator, "_opoverload", operator)
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    return []


def triton_body(operator: OpOverload) -> Callable[..., Any] | None:
    """Return the Python function of an operator of ``torch.library.triton_op``; None for any other operator.

    None too if the function launches kernels of Triton, which no graph of operators has.
    """
    name = operator._schema.name
    if operator.namespace in ("aten", "prims") or name not in triton_ops_to_kernels or triton_ops_to_kernels[name]:
        return None
    return _function_of(OPDEFS[name])


def _function_of(definition: CustomOpDef) -> Callable[..., Any]:
    """Return the function that the user has made an operator of. ``triton_op`` wraps it, and has no name for it."""
    function: Callable[..., Any] = definition._init_fn
    wrapped = definition._qualname in triton_ops_to_kernels
    return inspect.getclosurevars(function).nonlocals["fn"] if wrapped else function


def operator_functions(operator: Any) -> list[Any] | None:
    """Return the Python functions of a custom operator: its forward, the setup of its context, and its backward.

    Args:
        operator: the result of ``torch.library.custom_op`` or ``triton_op``, an overload of it, or a packet.

    Returns:
        The functions; None for any other operator, and for what is none.
    """
    if isinstance(operator, OpOverload):
        operator = OPDEFS.get(operator._schema.name)
    elif isinstance(operator, OpOverloadPacket):
        operator = OPDEFS.get(operator._qualified_op_name)
    if not isinstance(operator, CustomOpDef):
        return None
    return [_function_of(operator), operator._setup_context_fn, operator._backward_fn, operator._autocast_dtype]


def set_arguments(node: fx.Node, args: Any, kwargs: Any) -> None:
    """Set the arguments of a node that has none.

    An assignment would also take the node out of the graph's table of nodes by operator, and put it back.
    """
    object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)


def in_place_overload(operator: OpOverload) -> OpOverload | None:
    """Return the overload that takes the same arguments and writes to the first, or None.

    For ``aten.pow.Tensor_Scalar`` this is ``aten.pow_.Scalar``.
    """
    return next(_overloads_with_arguments_of(operator, f"{_name(operator)}_"), None)


def functional_overload(operator: OpOverload) -> OpOverload | None:
    """Return the out-of-place overload of an in-place operator, or None.

    For ``aten.pow_.Scalar`` this is ``aten.pow.Tensor_Scalar``.
    """
    name = _name(operator)
    if not name.endswith("_"):
        return None
    for overload in _overloads_with_arguments_of(operator, name.removesuffix("_")):
        schema = overload._schema
        if not (schema.is_mutable or any(result.alias_info is not None for result in schema.returns)):
            return overload
    return None


def overload_without_out(operator: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """Return the overload that returns what this one writes to arguments such as ``out``, and their names; or None."""
    out = [argument.name for argument in operator._schema.arguments if argument.is_out]
    wanted = [argument for argument in _arguments(operator) if argument[0] not in out]
    others = [one for one in overloads(operator.overloadpacket) if out and _arguments(one) == wanted]
    return (others[0], out) if others else None


def _name(operator: OpOverload) -> str:
    return operator._schema.name.removeprefix("aten::")


def _overloads_with_arguments_of(operator: OpOverload, name: str) -> Iterator[OpOverload]:
    """Yield overloads of aten's ``name`` that take the operator's arguments; their overload names differ."""
    arguments = _arguments(operator)
    for overload in [] if ":" in name else overloads(getattr(torch.ops.aten, name, None)):
        if _arguments(overload) == arguments:
            yield overload


def _arguments(operator: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
