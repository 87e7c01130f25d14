"""Compute the fake values of nodes. Equal calls are computed once, however many layers or graphs repeat them."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import CachingFakeMode, FakeTensor, OpOverload, empty_fake, size_key
from zerograph.ir.metadata import value


def evaluate(node: fx.Node) -> Any:
    """Return the node's value, computed from its inputs' values in their fake mode.

    Equal calls share one value: it has the right shape, strides, dtype and device, but says nothing about aliases.
    """
    args: Any
    kwargs: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    if node.target is operator.getitem:
        return args[0][args[1]]
    mode = mode_of(node.graph)
    key = (node.target, _described(args), _described(kwargs))
    if key in mode.results:
        return mode.results[key]
    # Integers become the default dtype where an operator divides them.
    global_key = (torch.get_default_dtype(), *key)
    if global_key in _LAYOUTS:
        result = _from_layout(_LAYOUTS[global_key], mode)
    else:
        with mode, torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        layout = _layout(result)
        if layout is not None and _depends_on_arguments_only(node):
            if len(_LAYOUTS) >= _MAX_LAYOUTS:
                _LAYOUTS.clear()
            _LAYOUTS[global_key] = layout
        if layout is not None:
            # A view references its base where the garbage collector does not see it. In the cache of its base's
            # mode it would keep all of them alive for ever.
            result = _from_layout(layout, mode)
    # The number in a tensor is a symbol of its own, even if the calls are equal.
    if not isinstance(result, _SYMBOLS):
        mode.results[key] = result
    return result


# Layouts of results, for all fake modes: an operator's shape function takes several times as long as empty_strided().
_LAYOUTS: dict[Hashable, Hashable] = {}

# Of some hundred bytes each; a full cache is cleared.
_MAX_LAYOUTS = 1 << 16


def _depends_on_arguments_only(node: fx.Node) -> bool:
    """Return True for an operator of torch without symbolic inputs: its layout is the same in any graph."""
    ours = not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "_c10d_functional")
    arguments: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), arguments.append)
    values = [value(argument) if isinstance(argument, fx.Node) else argument for argument in arguments]
    return not ours and not any(map(_is_symbolic, values))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, _SYMBOLS) for size in sizes)


def _layout(result: Any) -> Any:
    """Return shape, strides, dtype and device of a tensor or of each of several; None if a tensor has more to it."""
    if isinstance(result, (list, tuple)):
        parts = [_layout(part) for part in result]
        return None if None in parts else (type(result), *parts)
    plain = isinstance(result, FakeTensor) and result.layout is torch.strided
    if not plain or result.is_conj() or result.is_neg():
        return None
    return tuple(result.shape), result.stride(), result.dtype, result.device


def _from_layout(layout: Any, mode: CachingFakeMode) -> Any:
    """Return fake tensors of the mode with the layout."""
    if isinstance(layout[0], type):
        kind, *parts = layout
        return kind(_from_layout(part, mode) for part in parts)
    return empty_fake(mode, *layout)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def mode_of(graph: fx.Graph) -> CachingFakeMode:
    """Return the fake mode of the graph's values.

    Raises:
        ValueError: the graph has no tensors.
    """
    for node in graph.nodes:
        tensor = value(node)
        if isinstance(tensor, FakeTensor):
            assert isinstance(tensor.fake_mode, CachingFakeMode)
            return tensor.fake_mode
    raise ValueError("the graph has no tensors")


def _described(argument: Any) -> Hashable:
    """Return all that the result's layout depends on. Numbers have their type: 1, 1.0 and True promote differently."""
    if isinstance(argument, Tensor):
        return (*map(size_key, (*argument.shape, *argument.stride())), argument.dtype, argument.device)
    if isinstance(argument, (list, tuple)):
        return tuple([_described(entry) for entry in argument])
    if isinstance(argument, dict):
        return tuple([(key, _described(entry)) for key, entry in argument.items()])
    # The hash of a symbol would need its value.
    return type(argument), str(argument) if isinstance(argument, _SYMBOLS) else argument
