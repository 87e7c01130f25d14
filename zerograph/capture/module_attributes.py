"""Attributes of modules while ``build()`` is traced: no tensor of a trace stays in one, and none is lost silently.

A trace runs ``build()`` on fake tensors. The tensors that it assigns to attributes are fake, so modules get their
former attributes back. A buffer that another tensor is assigned to gets the values of that tensor, as in plain PyTorch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir.rewrite import ancestors

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """The attributes of a graph and its modules, as they were when this was created.

    Args:
        graph: the object whose ``build()`` is traced; None for no object.
        root: holds its modules.
        mode: the fake mode of the trace's tensors.
    """

    def __init__(self, graph: object, root: nn.Module, mode: _torch.FakeTensorMode) -> None:
        self._mode = mode
        self._modules = {name: vars(module) for name, module in root.named_modules()}
        self._graph = {} if graph is None else vars(graph)
        # Pairs of an attribute dict and its copy; containers in attributes and their copies, by id.
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for attributes in (self._graph, *self._modules.values()):
            self._before.append((attributes, dict(attributes)))
            for value in attributes.values():
                self._copy_contents(value)

    def _copy_contents(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS) and id(value) not in self._contents:
            self._contents[id(value)] = value, value.copy()
            for entry in value.values() if isinstance(value, dict) else value:
                self._copy_contents(entry)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """At the end remove tensors of the trace from attributes."""
        try:
            yield
        finally:
            self.restore()

    def restore(self, keep: Sequence[Tensor] = ()) -> None:
        """Restore all attributes of modules that hold tensors of the trace, and those attributes of the graph.

        A module gets all its attributes back because they belong together, as a table and its length do. Attributes of
        other modules stay as ``build()`` left them, a count of its calls for instance.

        Args:
            keep: attributes that hold one of these tensors stay.
        """
        kept = set(map(id, keep))
        with_fakes = {
            id(attributes) for attributes, _ in self._before if next(self._fakes(attributes), None) is not None
        }
        for container, copy in self._contents.values():
            fakes = set(map(id, self._fakes(container)))
            if fakes and kept.isdisjoint(fakes):
                container.clear()
                container.extend(copy) if isinstance(container, (list, deque)) else container.update(copy)
        for attributes, before in self._before:
            if id(attributes) in with_fakes:
                self._restore(attributes, before, kept, all_names=attributes is not self._graph)

    def _restore(self, attributes: dict[str, Any], before: dict[str, Any], kept: set[int], *, all_names: bool) -> None:
        for name in {**attributes, **before}:
            fakes = set(map(id, self._fakes(attributes.get(name))))
            if kept.isdisjoint(fakes) and (all_names or fakes):
                if name in before:
                    attributes[name] = before[name]
                else:
                    attributes.pop(name, None)

    def traced_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the trace that attributes hold now, by path."""
        tensors: dict[str, Tensor] = {}
        for path, attributes in (("", self._graph), *self._modules.items()):
            for name, value in attributes.items():
                if name not in ("_parameters", "_modules"):
                    for tensor in self._fakes(value):
                        tensors.setdefault(".".join(filter(None, (path, name))), tensor)
        return tensors

    def _fakes(self, value: Any) -> Iterator[Tensor]:
        """Yield the tensors of the trace in a value, through lists, tuples, sets and dicts."""
        if isinstance(value, _torch.FakeTensor) and value.fake_mode is self._mode:
            yield value
        elif isinstance(value, (*_CONTAINERS, tuple)):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from self._fakes(entry)


def keep_assigned(
    root: nn.Module,
    parameters: Collection[str],
    buffers: Collection[str],
    aliases: Mapping[str, str],
    state: Mapping[str, Tensor],
) -> None:
    """Copy the tensors that ``build()`` assigned to buffers into the traced buffers.

    Args:
        root: holds the modules.
        parameters: names of the parameters.
        buffers: names of the buffers.
        aliases: further names of the same tensors, mapped to the names above.
        state: the traced parameters and buffers, by name.

    Raises:
        CaptureError: ``build()`` assigned something of another shape or dtype, or replaced a parameter.
    """
    assigned: dict[str, Tensor] = {}
    for name in (*parameters, *buffers, *aliases):
        path, _, attribute = name.rpartition(".")
        module, first_name = root.get_submodule(path), aliases.get(name, name)
        value, traced = getattr(module, attribute, None), state[first_name]
        if value is traced:
            continue
        if first_name in parameters or (name in aliases and assigned.get(first_name) is not value):
            raise CaptureError(
                f"build() puts another tensor in the place of {name}\n"
                "Parameters, and buffers that several modules share, stay the tensors that they are: write to a buffer "
                "with copy_(), compute with another parameter through torch.func.functional_call."
            )
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (traced.shape, traced.dtype):
            what = repr(value)
            if isinstance(value, Tensor):
                what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            raise CaptureError(
                f"build() assigns {what:.120} to the buffer {name} of shape {tuple(traced.shape)} and {traced.dtype}\n"
                "A step is compiled for one shape and dtype: keep those, or change the buffer outside build()."
            )
        assigned[first_name] = value
    with torch.no_grad():
        # Copies first: one buffer may have been assigned to another.
        values = {name: value.detach().clone() for name, value in assigned.items()}
        for name, value in values.items():
            state[name].copy_(value)


def take_computed(graph: fx.GraphModule, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the graph's last outputs, which are ``stored`` in attributes; return those that depend on inputs.

    The others are constants, a table that is computed once for instance: the graph computes them in each step.
    """
    output = graph.graph.output_node()
    (nodes,) = output.args
    assert isinstance(nodes, (list, tuple))
    count = len(nodes) - len(stored)
    computed = {}
    for (name, tensor), node in zip(stored.items(), nodes[count:], strict=True):
        assert isinstance(node, fx.Node)
        if any(source.op == "placeholder" for source in (node, *ancestors([node]))):
            computed[name] = tensor
    output.args = (list(nodes[:count]),)
    for node in dict.fromkeys(nodes[count:]):
        assert isinstance(node, fx.Node)
        _erase_unused(node)
    return computed


def _erase_unused(node: fx.Node) -> None:
    """Erase a dead node and the get_attr nodes that only it used."""
    sources = node.all_input_nodes
    if not node.users and node.op != "placeholder":
        node.graph.erase_node(node)
        for source in sources:
            if source.op == "get_attr":
                _erase_unused(source)


def refuse_fakes(graph: fx.GraphModule, stored: Mapping[str, Tensor], others: Collection[str] = ()) -> None:
    """Refuse a graph that reads a tensor of an earlier trace, which has no values.

    Args:
        graph: the graph.
        stored: tensors that the earlier trace left in attributes, by path.
        others: names of other places where it left tensors.

    Raises:
        CaptureError: the graph reads one.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target))
        if isinstance(constant, _torch.FakeTensor):
            path = next((path for path, tensor in stored.items() if tensor is constant), None)
            raise stored_tensor_read(path, constant, others)


def stored_tensor_read(path: str | None, tensor: Tensor, others: Collection[str] = ()) -> CaptureError:
    """Return the error for a tensor that one step stores and the next one reads."""
    what = f"{path}, which the step before is to leave there"
    if path is None:
        where = ", ".join(others) or "Python state"
        what = f"a tensor of shape {tuple(tensor.shape)} that the step before is to leave in {where}"
    return CaptureError(
        f"build() reads {what}: what is computed stays in buffers only\n"
        "Register a buffer in __init__ and write to it with copy_(), or return the tensor and pass it to the next step."
    )


def lost_tensors(places: Iterable[str]) -> str:
    """Return the warning that the tensors that ``build()`` stores in some places are not there after the step."""
    return (
        f"build() stores tensors in {', '.join(places)}: after the step they are not there\n"
        "Return from build() what is to be read outside."
    )
