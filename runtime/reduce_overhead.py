"""Reduce the overhead of calling an emitted graph: the same operators on the same memory, with less work per call.

A step on small tensors takes as long as its operator calls. Views of tensors that stay from step to step are therefore
created once; aliases and views that change no shape are left out; pieces of a new tensor are cut by one call; operators
are called without Python's wrapper. Gathers into buffers that have the values already can be left out, too. Operators
that compute are unchanged, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.ir.alias import is_view
from zerograph.ir.pause import PAUSE
from zerograph.runtime.wire import collectives

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# Operators that return an argument: its index, or its keyword.
RETURNED_ARGUMENT: dict[Any, int | str] = {
    c10d.wait_tensor.default: 0,
    c10d.all_gather_into_tensor_out.default: "out",
    collectives.gather_into: 1,
}
# Faster spellings of views.
_FASTER: dict[Any, Callable[..., Any]] = {
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}
_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")
_PAUSE = f"torch.ops.{PAUSE}("


def reduce_overhead(
    graph: fx.GraphModule, feeds: Sequence[Tensor | None], *, pauses: bool = False, gathers: bool = True
) -> Callable[..., Any]:
    """Return a function that runs the graph with less overhead, given inputs that are the same tensors in every step.

    Args:
        graph: the emitted graph.
        feeds: for each placeholder the tensor that it is always given, or None where it changes between steps.
        pauses: the function returns a generator, which yields the values of the graph's pause and returns the results.
        gathers: False for a function that gathers no bucket into its gather buffer, and takes what this has.
    """
    rewritten = _Rewriter(graph, feeds, gathers=gathers)
    operators: dict[str, Any] = {}
    rewritten.graph.on_generate_code(lambda earlier: lambda body: _bind_operators(body, operators, pauses=pauses))
    module = fx.GraphModule(rewritten.attributes, rewritten.graph)
    for name, tensor in rewritten.tensors.items():
        # Not as a buffer: torch's modules look those up slowly.
        delattr(module, name)
        vars(module)[name] = tensor
    vars(module).update(operators)
    function: Callable[..., Any] = module.forward
    return function


class _Rewriter:
    """Copy a graph node by node. Names stay, so a generated line that fails leads to the emitted graph's node.

    Attributes:
        graph: the copy.
        attributes: the attributes of the module that ``graph`` reads.
        tensors: those of ``attributes`` that are the same tensors in every step.
    """

    def __init__(self, graph: fx.GraphModule, feeds: Sequence[Tensor | None], *, gathers: bool) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = dict(graph.named_children())
        self.tensors: dict[str, Tensor] = {}
        # Keys are nodes of the original graph.
        self._copies: dict[fx.Node, fx.Node] = {}
        self._constants: dict[fx.Node, Tensor] = {}
        # New 1-D tensors of the step.
        self._fresh: set[fx.Node] = set()
        self._returned = set(graph.graph.output_node().all_input_nodes)
        self._original, self._gathers = graph, gathers
        remaining_feeds = iter(feeds)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                feed = next(remaining_feeds)
                if feed is not None:
                    self._constants[node] = feed
            if not self._skip(node):
                self._copy(node)

    def _skip(self, node: fx.Node) -> bool:
        """Return whether the node needs no call in each step: a constant, a copied node or its users replace it."""
        if node.op != "call_function" or node in self._returned:
            return False
        if is_view(node) and not isinstance(node.meta.get("val"), (list, tuple)):
            source, *sizes = node.all_input_nodes
            if sizes:
                return False
            if source in self._constants:
                with torch.no_grad():
                    self._constants[node] = _evaluate(node, self._constants[source], *node.args[1:])
                return True
            if source in self._copies and self._is_same(node, source):
                self._copies[node] = self._copies[source]
                if source in self._fresh:
                    self._fresh.add(node)
                return True
            return node.target == aten.slice.Tensor and source in self._fresh and all(map(self._is_piece, node.users))
        if node.target == aten.scalar_tensor.default and not any(map(self._may_change, node.users)):
            self._constants[node] = _evaluate(node, *node.args)
            return True
        if not self._gathers and (returned := self._constant_returned(node)) is not None:
            self._constants[node] = returned
            return True
        return False

    def _constant_returned(self, node: fx.Node) -> Tensor | None:
        """Return the argument that the node returns, if that is the same tensor in every step."""
        place = RETURNED_ARGUMENT.get(node.target)
        return None if place is None else self._constants.get(_argument(node, place))

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
        faster = _FASTER.get(target, target)
        copy = self._copies[node] = self.graph.create_node(node.op, faster, name=node.name)
        # Not arguments of create_node(), which walks through them once more.
        _torch.set_arguments(copy, args, kwargs)
        if node.op == "get_attr":
            self.attributes[str(node.target)] = attrgetter(str(node.target))(self._original)
        if (returned := self._constant_returned(node)) is not None:
            self._constants[node] = returned
        if target == aten.empty.memory_format and isinstance(size := node.args[0], (list, tuple)) and len(size) == 1:
            self._fresh.add(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node, or an attribute that holds its constant tensor."""
        if node not in self._copies:
            name = f"{node.name}_of_all_steps"
            self.attributes[name] = self.tensors[name] = self._constants[node]
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
        """Return whether the node only reshapes a slice of a 1-D tensor."""
        if node.op != "call_function" or node.target != aten.view.default or node in self._returned:
            return False
        piece, *sizes = node.all_input_nodes
        if sizes:
            return False
        along_first = piece.target == aten.slice.Tensor and len(piece.args) == 4 and piece.args[1] == 0
        return "val" in node.meta and bool(along_first)

    def _may_change(self, user: fx.Node) -> bool:
        """Return whether a user of a tensor may write to it, or return it or a view of it."""
        target = user.target
        if user.op != "call_function" or not isinstance(target, OpOverload) or user in self._returned:
            return True
        return bool(_torch.written_arguments(user)) or bool(_torch.viewed_arguments(user))


def _evaluate(node: fx.Node, *args: Any) -> Tensor:
    operator = node.target
    assert isinstance(operator, OpOverload)
    result: Tensor = operator(*args, **node.kwargs)
    return result


def _argument(node: fx.Node, place: int | str) -> fx.Node:
    """Return an argument of the node, by index or keyword."""
    argument = node.kwargs[place] if isinstance(place, str) else node.args[place]
    assert isinstance(argument, fx.Node)
    return argument


def _bind_operators(body: list[str], operators: dict[str, Any], *, pauses: bool) -> list[str]:
    """Return lines of generated code that call operators by local names; add those to ``operators``.

    With ``pauses`` the lines yield the arguments of a pause.
    """

    def bind(match: re.Match[str]) -> str:
        namespace, packet, overload = match.groups()
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if not isinstance(operator, OpOverload):
            return match.group()
        local = f"call_{namespace}_{packet}_{overload}"
        operators[local] = _torch.unwrapped(operator)
        return f"{local}("

    lines = [_CALL.sub(bind, line.replace(_PAUSE, "(yield ") if pauses else line) for line in body]
    return [*(f"{local} = self.{local}\n" for local in operators), *lines]
