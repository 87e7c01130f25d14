"""The form of an emitted graph that a step runs: the same operators on the same memory, called with less work.

A step on small tensors takes as long as it takes to call its operators. So views of tensors that stay from step to step
are made once, aliases and views that change no shape are left out, pieces of a fresh tensor are cut by one call, and
operators are called without Python's wrapper around them. What computes runs as it stands, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.runtime.wire import collectives

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# Views: what they give follows from shape and strides alone.
_VIEWS: frozenset[Any] = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.slice.Tensor,
        aten.view.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.select.int,
        aten.expand.default,
    }
)
# They return an argument: its place, or its keyword.
_PASSED_ON: dict[Any, int | str] = {
    c10d.wait_tensor.default: 0,
    c10d.all_gather_into_tensor_out.default: "out",
    collectives.gather_into: 1,
}
# Forms of views that Python reaches by a shorter way.
_SHORTER: dict[Any, Callable[..., Any]] = {
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}
_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def lean(graph: fx.GraphModule, feeds: Sequence[Tensor | None]) -> Callable[..., Sequence[Any]]:
    """Return a function that runs the graph, for inputs of which some are the same tensors in every step.

    Args:
        feeds: for each placeholder the tensor that it is always given; None: others come with each step.
    """
    leaner = _Leaner(graph, feeds)
    module = fx.GraphModule(leaner.attributes, leaner.graph)
    operators: dict[str, Any] = {}
    module.graph.on_generate_code(lambda earlier: lambda body: _bound(earlier(body) if earlier else body, operators))
    module.recompile()
    for name, tensor in leaner.tensors.items():
        # Not as a buffer: torch's modules look those up slowly.
        delattr(module, name)
        vars(module)[name] = tensor
    vars(module).update(operators)
    function: Callable[..., Sequence[Any]] = module.forward
    return function


class _Leaner:
    """Copies a graph node by node; names stay, so that a line that fails leads to the emitted graph's node.

    Attributes:
        graph: the copy.
        attributes: what it reads of the module that is made of it.
        tensors: those among them that it reads in every step.
    """

    def __init__(self, graph: fx.GraphModule, feeds: Sequence[Tensor | None]) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = dict(graph.named_children())
        self.tensors: dict[str, Tensor] = {}
        # By node of the original: its copy, and its tensor where that is the same in every step.
        self._copies: dict[fx.Node, fx.Node] = {}
        self._tensors: dict[fx.Node, Tensor] = {}
        self._fresh: set[fx.Node] = set()
        self._returned = set(graph.graph.output_node().all_input_nodes)
        self._original = graph
        stay = iter(feeds)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                feed = next(stay)
                if feed is not None:
                    self._tensors[node] = feed
            if not self._left_out(node):
                self._copy(node)

    def _left_out(self, node: fx.Node) -> bool:
        """Return whether the node needs no call of its own in each step; what stands for it is known then."""
        if node.op != "call_function" or node in self._returned:
            return False
        if node.target in _VIEWS:
            (source,) = node.all_input_nodes
            if source in self._tensors:
                with torch.no_grad():
                    self._tensors[node] = _called(node, self._tensors[source], *node.args[1:])
                return True
            if source in self._copies and self._is_same(node, source):
                self._copies[node] = self._copies[source]
                if source in self._fresh:
                    self._fresh.add(node)
                return True
            return node.target == aten.slice.Tensor and source in self._fresh and all(map(self._is_piece, node.users))
        if node.target == aten.scalar_tensor.default and not any(map(self._may_change, node.users)):
            self._tensors[node] = _called(node, *node.args)
            return True
        return False

    def _copy(self, node: fx.Node) -> None:
        target, args, kwargs = node.target, node.args, node.kwargs
        if self._is_piece(node):
            piece = node.all_input_nodes[0]
            (source,) = piece.all_input_nodes
            if piece not in self._copies and source in self._fresh:
                start = piece.args[2] if len(piece.args) > 2 else 0
                value = node.meta["val"]
                target, args, kwargs = torch.as_strided, (source, value.shape, value.stride(), start), {}
        args, kwargs = fx.map_arg((args, kwargs), self._copied)
        shorter = _SHORTER.get(target, target)
        self._copies[node] = self.graph.create_node(node.op, shorter, args, kwargs, name=node.name)
        if node.op == "get_attr":
            self.attributes[str(node.target)] = _attribute(self._original, str(node.target))
        passed_on = _PASSED_ON.get(target)
        if passed_on is not None and _input(node, passed_on) in self._tensors:
            self._tensors[node] = self._tensors[_input(node, passed_on)]
        if target == aten.empty.memory_format and isinstance(size := node.args[0], (list, tuple)) and len(size) == 1:
            self._fresh.add(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            name = f"{node.name}_of_all_steps"
            self.attributes[name] = self.tensors[name] = self._tensors[node]
            self._copies[node] = self.graph.get_attr(name)
        return self._copies[node]

    def _is_same(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether a view has the shape and strides of its source, and begins where that does."""
        if node.target in (aten.alias.default, aten.detach.default):
            return True
        before, after = source.meta.get("val"), node.meta.get("val")
        if node.target != aten.view.default or not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return False
        return bool(before.shape == after.shape)

    def _is_piece(self, node: fx.Node) -> bool:
        """Return whether the node only gives a piece of a tensor a shape."""
        if node.op != "call_function" or node.target != aten.view.default or node in self._returned:
            return False
        (piece,) = node.all_input_nodes
        along_first = piece.target == aten.slice.Tensor and len(piece.args) == 4 and piece.args[1] == 0
        return "val" in node.meta and bool(along_first)

    def _may_change(self, user: fx.Node) -> bool:
        """Return whether a user of a tensor may write to it, or give it, or a view of it, to somebody else."""
        target = user.target
        if user.op != "call_function" or not isinstance(target, OpOverload) or user in self._returned:
            return True
        return bool(_torch.written_arguments(user)) or bool(_torch.viewed_arguments(user))


def _called(node: fx.Node, *args: Any) -> Tensor:
    operator = node.target
    assert isinstance(operator, OpOverload)
    found: Tensor = operator(*args, **node.kwargs)
    return found


def _input(node: fx.Node, place: int | str) -> fx.Node:
    """Return an argument of the node, by place or keyword."""
    argument = node.kwargs[place] if isinstance(place, str) else node.args[place]
    assert isinstance(argument, fx.Node)
    return argument


def _attribute(root: torch.nn.Module, path: str) -> Any:
    found: Any = root
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _bound(body: list[str], operators: dict[str, Any]) -> list[str]:
    """Lines of generated code with operators as local names; which are filled into ``operators`` for the module."""

    def name(match: re.Match[str]) -> str:
        space, packet, overload = match.groups()
        found = getattr(getattr(getattr(torch.ops, space), packet), overload)
        if not isinstance(found, OpOverload):
            return match.group()
        local = f"call_{space}_{packet}_{overload}"
        operators[local] = _torch.unwrapped(found)
        return f"{local}("

    lines = [_CALL.sub(name, line) for line in body]
    return [*(f"{local} = self.{local}\n" for local in operators), *lines]
