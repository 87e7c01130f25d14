"""Trace an update that branches on tensors' values, or on numbers that it counts, as one graph.

``if state["step"] % 10 == 0`` asks for the value of a tensor. The update is traced once for each sequence of answers.
The traces become one graph that computes what any of them does, once if several do, and selects the results by
``torch.where``. Where a rank updates whole parameters of its own, it runs only the selected branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.errors import CaptureError
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.rewrite import replace_node
from zerograph.ir.step_graph import output_nodes, placeholders

aten = torch.ops.aten

Answers = tuple[bool, ...]
# Traces of one update that are worth the time.
_LIMIT = 32


@dataclass(frozen=True)
class Trace:
    """A trace of an update for some answers.

    Attributes:
        graph: the traced graph; the last results are the conditions that the update asked for.
        asked: their number.
    """

    graph: fx.GraphModule
    asked: int


def over_branches(optimizer: str, trace: Callable[[Answers], Trace]) -> fx.GraphModule:
    """Trace an update for all sequences of answers, and return one graph for all.

    Args:
        optimizer: name of its class.
        trace: traces the update with these answers to its first conditions, and False for all later ones.

    Raises:
        CaptureError: there are too many sequences.
    """
    first = trace(())
    if not first.asked:
        return first.graph
    leaves: dict[Answers, fx.GraphModule] = {}
    todo: list[Answers] = [()]
    while todo:
        given = todo.pop()
        found = trace(given) if given else first
        answers = given + (False,) * (found.asked - len(given))
        leaves[answers] = found.graph
        todo += [(*answers[:index], True) for index in range(len(given), found.asked)]
        if len(leaves) + len(todo) > _LIMIT:
            raise CaptureError(
                f"{optimizer}.step() has more than {_LIMIT} ways through its branches on values of tensors or on "
                "numbers that it counts\nUse torch.where, or another optimizer."
            )
    return _merged({answers: functional(graph) for answers, graph in leaves.items()})


def functional(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph of an update without mutation, but for final writes to its inputs."""
    nodes = placeholders(graph.graph)
    result = without_mutation(graph)
    for old, new in zip(nodes, placeholders(result.graph), strict=True):
        new.meta.update({key: value for key, value in old.meta.items() if key == "update_input"})
    for node in result.graph.find_nodes(op="get_attr"):
        constant = getattr(result, str(node.target))
        if isinstance(constant, Tensor) and constant.dim() == 0:
            with result.graph.inserting_before(node):
                options: dict[str, Any] = {"dtype": constant.dtype, "device": constant.device}
                full = result.graph.call_function(aten.full.default, ([], constant.item()), options)
            full.meta.update(node.meta)
            replace_node(node, full)
    # There is no autograd here: a detached tensor is the tensor itself, and may be written in place.
    for node in result.graph.find_nodes(op="call_function", target=aten.detach.default):
        replace_node(node, node.all_input_nodes[0])
    return result


class _Merged:
    """The one graph of several, as far as it is made.

    Attributes:
        root: its constants.
        graph: its nodes. Equal operators on equal arguments are one node.
    """

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.inputs = [self.graph.node_copy(node) for node in inputs]
        self._known: dict[str, fx.Node] = {}

    def add(self, leaf: fx.GraphModule) -> tuple[dict[fx.Node, fx.Node], list[fx.Node]]:
        """Add the nodes of a graph; return what it writes to each input, and its results."""
        copies = dict(zip(placeholders(leaf.graph), self.inputs, strict=True))
        writes: dict[fx.Node, fx.Node] = {}
        for node in leaf.graph.nodes:
            if node.op == "get_attr":
                copies[node] = self._constant(node, getattr(leaf, str(node.target)))
            elif node.target is aten.copy_.default and node.args[0].op == "placeholder":
                writes[copies[node.args[0]]] = copies[node.args[1]]
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = self._call(node.target, args, kwargs, node.meta)
        return writes, [copies[one] for one in output_nodes(leaf.graph)]

    def select(self, condition: fx.Node, yes: fx.Node, no: fx.Node) -> fx.Node:
        """Return the node that is ``yes`` if the condition holds, else ``no``."""
        if yes is no:
            return yes
        value: Tensor = condition.meta["val"]
        if value.dtype is not torch.bool or value.dim():
            flat = self._call(aten.view.default, (condition, []), {}, {"val": value.new_empty(())})
            condition = self._call(aten.ne.Scalar, (flat, 0), {}, {"val": value.new_empty((), dtype=torch.bool)})
        return self._call(aten.where.self, (condition, yes, no), {}, {"val": yes.meta["val"]})

    def _constant(self, node: fx.Node, constant: Tensor) -> fx.Node:
        known = dict(self.root.named_buffers())
        name = next((name for name, one in known.items() if _same(one, constant)), f"constant_{len(known)}")
        if name not in known:
            self.root.register_buffer(name, constant, persistent=False)
            self._known[name] = self.graph.get_attr(name)
            self._known[name].meta.update(node.meta)
        return self._known[name]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Mapping[str, Any]) -> fx.Node:
        """Emit an operator, unless it is known."""
        key = f"{target} {args} {kwargs}"
        if key not in self._known:
            self._known[key] = self.graph.call_function(target, args, kwargs)
            self._known[key].meta.update(meta)
        return self._known[key]


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype is second.dtype and first.device == second.device and torch.equal(first, second)


def _merged(leaves: Mapping[Answers, fx.GraphModule]) -> fx.GraphModule:
    merged = _Merged(placeholders(next(iter(leaves.values())).graph))
    written: dict[Answers, dict[fx.Node, fx.Node]] = {}
    returned: dict[Answers, list[fx.Node]] = {}
    conditions: dict[Answers, fx.Node] = {}
    for answers, leaf in leaves.items():
        written[answers], results = merged.add(leaf)
        count = len(results) - len(answers)
        returned[answers] = results[:count]
        conditions |= {answers[:index]: node for index, node in enumerate(results[count:])}

    def selected(values: Mapping[Answers, fx.Node], start: Answers = ()) -> fx.Node:
        if start in values:
            return values[start]
        return merged.select(conditions[start], selected(values, (*start, True)), selected(values, (*start, False)))

    news = {
        node: selected({answers: writes.get(node, node) for answers, writes in written.items()})
        for node in merged.inputs
        if any(node in writes for writes in written.values())
    }
    results = [
        selected({answers: values[index] for answers, values in returned.items()})
        for index in range(len(next(iter(returned.values()))))
    ]
    for node, value in news.items():
        merged.graph.call_function(aten.copy_.default, (node, value)).meta["val"] = node.meta["val"]
    merged.graph.output(results)
    return fx.GraphModule(merged.root, merged.graph)
