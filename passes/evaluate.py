"""A node's value, computed on fake tensors: every kind of call once, however many layers repeat it."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import FakeTensor, Known
from zerograph.step_graph import value


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
    if key in mode.known:
        return mode.known[key]
    with mode, torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    # A number that a tensor holds is that tensor's own, however many look alike.
    if not isinstance(result, _SYMBOLS):
        mode.known[key] = result
    return result


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def mode_of(graph: fx.Graph) -> Known:
    """The fake mode that the graph's values live in."""
    for node in graph.nodes:
        found = value(node)
        if isinstance(found, FakeTensor):
            assert isinstance(found.fake_mode, Known)
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
