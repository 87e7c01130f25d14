"""A node's value, computed on fake tensors: every kind of call once, however many layers or graphs repeat it."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import CachingFakeMode, FakeTensor, OpOverload
from zerograph.ir.metadata import value


def evaluate(node: fx.Node) -> Any:
    """The node's value from its inputs' values, in their fake mode.

    Calls with equal arguments share one value: it tells shape, strides, dtype and device, never whose memory it is.
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
    everywhere = (torch.get_default_dtype(), *key)
    with mode, torch.no_grad():
        if everywhere in _LAYOUTS:
            result = _made(_LAYOUTS[everywhere])
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            layout = _layout(result)
            if layout is not None and _follows_from(node):
                if len(_LAYOUTS) >= _MOST_LAYOUTS:
                    _LAYOUTS.clear()
                _LAYOUTS[everywhere] = layout
            if layout is not None:
                # A view holds its base where the garbage collector does not see it: kept in the mode that its base
                # leads to, it would keep all of them for ever.
                result = _made(layout)
    # A number that a tensor holds is that tensor's own, however many look alike.
    if not isinstance(result, _SYMBOLS):
        mode.results[key] = result
    return result


# What calls yield in any fake mode: an operator's own reckoning takes several times as long as making its result.
_LAYOUTS: dict[Hashable, Hashable] = {}

# Some hundred bytes each; then from the beginning.
_MOST_LAYOUTS = 1 << 16


def _follows_from(node: fx.Node) -> bool:
    """Whether the operator's result has no other layout in another graph: torch's own, and nothing symbolic."""
    ours = not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "_c10d_functional")
    return not ours and not any(isinstance(value(given), _SYMBOLS) for given in node.all_input_nodes)


def _layout(result: Any) -> Any:
    """Shape, strides, dtype and device of a tensor, of each of several; None if that does not say all."""
    if isinstance(result, (list, tuple)):
        each = [_layout(one) for one in result]
        return None if None in each else (type(result), *each)
    plain = isinstance(result, FakeTensor) and result.layout is torch.strided
    if not plain or result.is_conj() or result.is_neg():
        return None
    return tuple(result.shape), result.stride(), result.dtype, result.device


def _made(layout: Any) -> Any:
    """Fake tensors so laid out, in the mode that is on."""
    if isinstance(layout[0], type):
        kind, *each = layout
        return kind(map(_made, each))
    shape, strides, dtype, device = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def mode_of(graph: fx.Graph) -> CachingFakeMode:
    """The fake mode that the graph's values live in."""
    for node in graph.nodes:
        found = value(node)
        if isinstance(found, FakeTensor):
            assert isinstance(found.fake_mode, CachingFakeMode)
            return found.fake_mode
    raise ValueError("the graph has no tensors")


def _described(argument: Any) -> Hashable:
    """All that the result's metadata can follow from. Numbers with their type: 1, 1.0 and True promote differently."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple([_described(one) for one in argument])
    if isinstance(argument, dict):
        return tuple([(key, _described(one)) for key, one in argument.items()])
    # A symbol's hash would ask for its value.
    return type(argument), str(argument) if isinstance(argument, _SYMBOLS) else argument
