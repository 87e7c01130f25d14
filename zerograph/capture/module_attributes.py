"""Attributes of modules while ``build()`` is traced: no tensor of a trace stays in one, and none is lost silently.

A trace runs ``build()`` on fake tensors. What it puts into attributes would be fake in all that is called later, so the
modules get back what they had. A buffer that gets another tensor keeps its values, as a step of plain PyTorch does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir.rewrite import ancestors

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """What a graph and its modules hold, as it was when this was made.

    Args:
        graph: whose ``build()`` is to be traced; None for no graph.
        root: holds its modules.
        mode: makes the fake tensors of the trace.
    """

    def __init__(self, graph: object, root: nn.Module, mode: _torch.FakeTensorMode) -> None:
        self._mode = mode
        self._modules = {name: vars(module) for name, module in root.named_modules()}
        self._graph = {} if graph is None else vars(graph)
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for held in (self._graph, *self._modules.values()):
            self._before.append((held, dict(held)))
            for value in held.values():
                self._note(value)

    def _note(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS) and id(value) not in self._contents:
            self._contents[id(value)] = value, value.copy()
            for one in value.values() if isinstance(value, dict) else value:
                self._note(one)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """At the end no attribute holds a tensor of the trace; behind an error they all are as they were."""
        try:
            yield
        except BaseException:
            self.give_back(everything=True)
            raise
        self.give_back()

    def give_back(self, but: Sequence[Tensor] = (), *, everything: bool = False) -> None:
        """A module that holds tensors of the trace gets back what it had; the graph the attributes that hold them.

        All of a module's attributes: how long a table is stands beside the table. Others stay as ``build()`` left them,
        a count of its calls for instance, unless it is to be ``everything``. What holds one of ``but`` stays.
        """
        kept = set(map(id, but))
        stained = {id(held) for held, _ in self._before if next(self._fakes(held), None) is not None}
        for container, copy in self._contents.values():
            if (found := set(map(id, self._fakes(container)))) and kept.isdisjoint(found):
                container.clear()
                container.extend(copy) if isinstance(container, (list, deque)) else container.update(copy)
        for held, before in self._before:
            if everything or id(held) in stained:
                self._give_back(held, before, kept, whole=held is not self._graph)

    def _give_back(self, held: dict[str, Any], before: dict[str, Any], kept: set[int], *, whole: bool) -> None:
        for name in {**held, **before}:
            fakes = set(map(id, self._fakes(held.get(name))))
            if kept.isdisjoint(fakes) and (whole or fakes):
                if name in before:
                    held[name] = before[name]
                else:
                    held.pop(name, None)

    def left(self) -> dict[str, Tensor]:
        """The tensors of the trace that are in attributes now, by where they are."""
        found: dict[str, Tensor] = {}
        for path, held in (("", self._graph), *self._modules.items()):
            for name, value in held.items():
                if name not in ("_parameters", "_modules"):
                    for one in self._fakes(value):
                        found.setdefault(".".join(filter(None, (path, name))), one)
        return found

    def _fakes(self, value: Any) -> Iterator[Tensor]:
        """The tensors of the trace in a value, in lists, tuples, sets and dicts among them."""
        if isinstance(value, _torch.FakeTensor) and value.fake_mode is self._mode:
            yield value
        elif isinstance(value, (*_CONTAINERS, tuple)):
            for one in value.values() if isinstance(value, dict) else value:
                yield from self._fakes(one)


def keep_assigned(
    root: nn.Module,
    parameters: Collection[str],
    buffers: Collection[str],
    aliases: Mapping[str, str],
    own: Mapping[str, Tensor],
) -> None:
    """Write what ``build()`` assigned to buffers into the tensors that stood for them, ``own``.

    Raises:
        CaptureError: what was assigned is no buffer's value, or takes the place of a parameter.
    """
    assigned: dict[str, Tensor] = {}
    for name in (*parameters, *buffers, *aliases):
        path, _, attribute = name.rpartition(".")
        module, first = root.get_submodule(path), aliases.get(name, name)
        now = getattr(module, attribute, None)
        if now is own[first]:
            continue
        if first in parameters or (name in aliases and assigned.get(first) is not now):
            raise CaptureError(
                f"build() puts another tensor in the place of {name}\n"
                "Parameters, and buffers that several modules share, stay the tensors that they are: write to a buffer "
                "with copy_(), compute with another parameter through torch.func.functional_call."
            )
        old = own[first]
        if not isinstance(now, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
            what = f"a tensor of shape {tuple(now.shape)} and {now.dtype}" if isinstance(now, Tensor) else repr(now)
            raise CaptureError(
                f"build() assigns {what:.120} to the buffer {name} of shape {tuple(old.shape)} and {old.dtype}\n"
                "A step is compiled for one shape and dtype: keep those, or change the buffer outside build()."
            )
        assigned[first] = now
    with torch.no_grad():
        # One may have been assigned another.
        values = {name: value.detach().clone() for name, value in assigned.items()}
        for name, value in values.items():
            own[name].copy_(value)


def computed(graph: fx.GraphModule, left: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take what is ``left``, the last of the graph's outputs, out of them; returns what depends on the graph's inputs.

    The rest are constants, a table that is made once for instance: the graph makes them in each step.
    """
    output = graph.graph.output_node()
    (nodes,) = output.args
    assert isinstance(nodes, (list, tuple))
    own = len(nodes) - len(left)
    found = {}
    for (name, tensor), node in zip(left.items(), nodes[own:], strict=True):
        assert isinstance(node, fx.Node)
        if any(one.op == "placeholder" for one in (node, *ancestors([node]))):
            found[name] = tensor
    output.args = (list(nodes[:own]),)
    for node in dict.fromkeys(nodes[own:]):
        assert isinstance(node, fx.Node)
        _erase_unread(node)
    return found


def _erase_unread(node: fx.Node) -> None:
    """What nobody reads is not read of an attribute either."""
    sources = node.all_input_nodes
    if not node.users and node.op != "placeholder":
        node.graph.erase_node(node)
        for source in sources:
            if source.op == "get_attr":
                _erase_unread(source)


def refuse_fakes(graph: fx.GraphModule, kept: Mapping[str, Tensor]) -> None:
    """A graph that computes with a tensor of an earlier trace would compute with nothing.

    Args:
        kept: what an earlier trace left in attributes, by name.

    Raises:
        CaptureError: it does.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target))
        if isinstance(constant, _torch.FakeTensor):
            where = next((name for name, one in kept.items() if one is constant), None)
            raise refused(where, constant)


def refused(where: str | None, tensor: Tensor) -> CaptureError:
    """What is said of a tensor that is to go from step to step in an attribute."""
    what = f"a tensor of shape {tuple(tensor.shape)}" if where is None else where
    return CaptureError(
        f"build() reads {what}, which the step before is to leave there: what is computed stays in buffers only\n"
        "Register a buffer in __init__ and write to it with copy_(), or return the tensor and pass it to the next step."
    )


def warn_of_lost(kept: Mapping[str, Tensor]) -> None:
    """Say that what ``build()`` stored is not there behind the step."""
    if kept:
        warnings.warn(
            f"build() stores tensors in {', '.join(kept)}: behind the step they are not there\n"
            "Return from build() what is to be read outside.",
            stacklevel=2,
        )
