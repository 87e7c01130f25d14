"""Recorded calls that change gradients: ``backward()`` and edits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.loops.deferred import Meta, Result
from zerograph.loops.tape import Call, Named, Outcome, RealTensor


@dataclass
class Event:
    """A recorded ``backward()`` or edit of gradients.

    Attributes:
        touches: the numbers of the optimizers whose gradients it changes.
        cleared: those of them whose gradients were cleared since.
        added: those of them whose accumulated gradients it has changed already.
        loss: the result that ``backward()`` was called on; None for an edit.
    """

    touches: set[int]
    loss: Result | None = None
    cleared: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)

    def concerns(self, optimizers: Iterable[int]) -> set[int]:
        """Return those of the optimizers that use its gradients."""
        return (self.touches & set(optimizers)) - self.cleared


def backward_call(loss: Result, retain_graph: bool) -> Call:
    """Return a call of ``backward()`` on a loss."""
    tree, outcome = _of_backward(retain_graph)
    leaves = (loss, True) if retain_graph else (loss,)
    return Call(_run_backward, False, leaves, tree, True, outcome, source.running_line())


@functools.cache
def _of_backward(retain_graph: bool) -> tuple[pytree.TreeSpec, Outcome]:
    """Return how the arguments of ``backward()`` are nested, and its outcome."""
    tree = pytree.tree_structure(((0,), {"retain_graph": True} if retain_graph else {}))
    return tree, Outcome(pytree.tree_structure(()), (), False, (), shared=True)


def _run_backward(loss: Tensor, *, retain_graph: bool | None = None) -> None:
    loss.backward(retain_graph=retain_graph)


class Edits:
    """Makes the calls that edit gradients. Equal ones, of which each step has one, share all but their tensors."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Named, ...], pytree.TreeSpec, Outcome]] = {}

    def call(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parameter: Tensor,
    ) -> Call:
        """Return a call of ``function(parameters, *args, **kwargs)``, which returns a 0-d tensor.

        Args:
            function: the function.
            names: the names of the parameters.
            args: further arguments.
            kwargs: keyword arguments.
            parameter: the first parameter.
        """
        dtype = torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype
        meta = Meta((), (), dtype, parameter.device)
        key = function, tuple(names), _constants(args), tuple(kwargs), _constants(kwargs.values()), meta
        if key not in self._known:
            named = tuple(map(Named, names))
            tree = pytree.tree_structure(((list(named), *args), dict(kwargs)))
            self._known[key] = named, tree, Outcome(pytree.tree_structure(0), (meta,), False, (), shared=True)
        named, tree, outcome = self._known[key]
        leaves = (*named, *pytree.tree_leaves((tuple(args), dict(kwargs))))
        return Call(function, False, leaves, tree, True, outcome, source.running_line())


def _constants(arguments: Iterable[Any]) -> Hashable:
    """Return a key of constants, in which 1 and 1.0 differ. Results and real tensors are alike."""
    return tuple("" if isinstance(one, (Result, RealTensor)) else (type(one), repr(one)) for one in arguments)
