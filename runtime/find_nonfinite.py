"""Run a graph node by node to find the node that first produced a number that is not finite.

The graph is one that changes no state (up to pass ``loop``). Only the nodes that the wanted value needs are run,
collectives included, on all ranks alike. Each value that is not finite has a *cause*: the first node, in execution
order, among the value's ancestors that produced such a number. Infinities that the user wrote, such as those of a mask,
are a cause only if there is no other: the operator that turns them into NaN is its own cause.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.ir.alias import WAIT
from zerograph.ir.finite_check import has_fractions
from zerograph.ir.loop import Loop, accumulate, collect, loop_of
from zerograph.ir.metadata import Origin, Role, boxing_of, origin, role
from zerograph.ir.rewrite import ancestors
from zerograph.ir.step_graph import placeholders
from zerograph.ops.tree_sum import accumulate_in_tree

aten = torch.ops.aten

# Operators whose result has no defined values yet.
_UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
}


@dataclass(frozen=True)
class Cause:
    """The node that produced the first number that is not finite.

    Attributes:
        order: its position in execution order, equal on all ranks for the same node.
        source: the operator; for an input of the graph its role.
        origin: phase, module and line of an operator.
        nans, infinities, elements: how many elements, on this rank, are NaN, are infinite, exist.
        micro_batch: in which micro-batch, from 0; None outside of the loop.
        intended: these are infinities of the user's: constants in the code, or values of a buffer.
        index: the position of one such element in the value on this rank.
        infinities_from: the cause of the intended infinities that an operator turned into NaN.
    """

    order: tuple[int, ...]
    source: Role | str
    origin: Origin
    nans: int
    infinities: int
    elements: int
    micro_batch: int | None = None
    intended: bool = False
    index: tuple[int, ...] = ()
    infinities_from: Cause | None = None


@dataclass
class NonFiniteSearch:
    """A callable like a compiled graph that computes one node and finds the cause if the value is not finite.

    Attributes:
        graph: the graph.
        wanted: the node to compute.
        cause: set by a call; None where the value is finite.
    """

    graph: fx.Graph
    wanted: fx.Node
    cause: Cause | None = None

    @functools.cached_property
    def needed(self) -> frozenset[fx.Node]:
        """Return the nodes that are run and the inputs that are read."""
        return frozenset({self.wanted} | ancestors([self.wanted]))

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Compute the wanted node from the graph's inputs; set ``cause``. Returns the node's value, in a list."""
        run = _Run()
        run.follow(self.graph, inputs, [None] * len(inputs), self.needed, keep={self.wanted})
        self.cause = run.causes.get(self.wanted)
        return [run.values[self.wanted]]


@dataclass
class _Run:
    """One run of a graph or of a loop's body.

    Attributes:
        values, causes: of the nodes that a later node reads.
        result_causes: the cause of each result of a loop.
        order: the position of the loop node whose body this is, and the micro-batch.
        micro_batch: the number of the micro-batch; None outside of the loop.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    causes: dict[fx.Node, Cause] = field(default_factory=dict)
    result_causes: dict[fx.Node, list[Cause | None]] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    micro_batch: int | None = None

    def follow(
        self,
        graph: fx.Graph,
        inputs: Sequence[Any],
        input_causes: Sequence[Cause | None],
        needed: Iterable[fx.Node],
        keep: Iterable[fx.Node] = (),
    ) -> None:
        """Run the ``needed`` nodes, and free each value after its last use, those of ``keep`` excepted.

        Args:
            input_causes: the cause of each input that is not finite, where a cause outside the graph is known.
        """
        needed, keep = set(needed), set(keep)
        last_uses = _last_uses([node for node in graph.nodes if node in needed])
        remaining_inputs = iter(zip(inputs, input_causes, strict=True))
        assert graph.owning_module is not None
        interpreter = fx.Interpreter(graph.owning_module, garbage_collect_values=False, graph=graph)
        for number, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                self.values[node], cause = next(remaining_inputs)
                if node in needed:
                    self._note_cause(node, number, [] if cause is None else [cause])
                continue
            if node.op == "output" or node not in needed:
                continue
            if (loop := loop_of(node)) is not None:
                self._run_loop(node, loop, number)
            else:
                self._run_node(node, number, interpreter)
            for dead in last_uses.get(node, ()):
                if dead not in keep:
                    self.values.pop(dead, None)
                    self.causes.pop(dead, None)

    def _run_node(self, node: fx.Node, number: int, interpreter: fx.Interpreter) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        causes = self._causes_of(node.all_input_nodes)
        self.values[node] = getattr(interpreter, node.op)(node.target, args, kwargs)
        if node.target in (accumulate, accumulate_in_tree, collect):
            # The tensors that it writes are the loop's results from here on. Only a sum depends on earlier values.
            results = node.all_input_nodes[: 2 if node.target is accumulate_in_tree else 1]
            first_write = self.micro_batch == 0 and node.target is accumulate
            summands = [argument for argument in node.all_input_nodes if argument not in results]
            for result in results:
                self.causes.pop(result, None)
                self._note_cause(result, number, self._causes_of(summands) if first_write else causes, producer=node)
        elif any(user.target is WAIT for user in node.users):
            # A collective has no value before it has been waited for.
            if causes:
                self.causes[node] = _first(causes)
        elif node.target is getitem and node.args[0] in self.result_causes:
            loop_node, index = node.args
            assert isinstance(loop_node, fx.Node)
            assert isinstance(index, int)
            cause = self.result_causes[loop_node][index]
            self._note_cause(node, number, [] if cause is None else [cause])
        else:
            self._note_cause(node, number, causes)

    def _run_loop(self, node: fx.Node, loop: Loop, number: int) -> None:
        arguments = [argument for argument in node.args if isinstance(argument, fx.Node)]
        operands = [self.values[argument] for argument in arguments]
        causes = [self.causes.get(argument) for argument in arguments]
        results = tuple(result.zero_() for result in loop.make_results(operands))
        result_causes: list[Cause | None] = [None] * len(results)
        body = loop.body.graph
        result_nodes = placeholders(body, "result")
        for micro_batch in range(loop.micro_batches):
            run = _Run(order=(*self.order, number, micro_batch), micro_batch=micro_batch)
            inputs = loop.inputs(operands, results, torch.tensor(micro_batch), micro_batch)
            of_tensors = [*causes[: len(loop.cuts)], *result_causes]
            unknown = [None] * (len(inputs) - len(of_tensors))
            run.follow(body, inputs, [*of_tensors, *unknown], body.nodes, keep=result_nodes)
            result_causes = [run.causes.get(result_node) for result_node in result_nodes]
        self.values[node], self.result_causes[node] = results, result_causes

    def _causes_of(self, nodes: Iterable[fx.Node]) -> list[Cause]:
        return [self.causes[node] for node in nodes if node in self.causes]

    def _note_cause(
        self, node: fx.Node, number: int, input_causes: Sequence[Cause], producer: fx.Node | None = None
    ) -> None:
        """Note the cause of the node's value if it is not finite.

        Args:
            number: the node's position in the graph.
            input_causes: of the inputs that are not finite.
            producer: the node that wrote the value, if not the node itself.
        """
        is_result = (node_role := role(node)) is not None and node_role.kind == "result"
        if node.target in _UNINITIALISED or (is_result and producer is None):
            if input_causes:
                self.causes[node] = _first(input_causes)
            return
        counts = _count(self.values[node])
        if counts is None:
            return
        nans, infinities, elements, index = counts
        intended = [cause for cause in input_causes if cause.intended]
        if input_causes and (not nans or len(intended) < len(input_causes)):
            self.causes[node] = _first([cause for cause in input_causes if not cause.intended] or input_causes)
            return
        producer = producer or node
        self.causes[node] = Cause(
            (*self.order, number),
            _source(producer),
            origin(producer),
            nans,
            infinities,
            elements,
            self.micro_batch,
            intended=not nans and _writes_infinities(producer),
            index=index,
            infinities_from=_first(intended) if intended else None,
        )


def _source(node: fx.Node) -> Role | str:
    """Return the role of an input, or the name of a collective or operator."""
    node_role = role(node)
    if node.op == "placeholder" and node_role is not None:
        return node_role
    if node.target is WAIT:
        boxing = boxing_of(node.all_input_nodes[0])
        if boxing is not None:
            return f"the {boxing.kind} of {boxing.tensor}"
    return str(node.target)


def _first(causes: Sequence[Cause]) -> Cause:
    return min(causes, key=lambda cause: cause.order)


def _last_uses(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    """Return for each node the values that no later node reads."""
    seen: set[fx.Node] = set()
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen:
                seen.add(value)
                dead.setdefault(node, []).append(value)
    return dead


def _writes_infinities(node: fx.Node) -> bool:
    """Return whether infinities of the node are the user's: constants, or values of a buffer, such as a mask."""
    node_role = role(node)
    if node.op == "get_attr" or (node.op == "placeholder" and node_role is not None and node_role.kind == "buffer"):
        return True
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return any(isinstance(leaf, float) and leaf in (float("inf"), float("-inf")) for leaf in leaves)


def _count(value: Any) -> tuple[int, int, int, tuple[int, ...]] | None:
    """Return how many NaNs, infinities and elements there are, and the index of one; None if all are finite."""
    nans = infinities = elements = 0
    index: tuple[int, ...] = ()
    for tensor in pytree.tree_leaves(value):
        if not isinstance(tensor, Tensor) or not has_fractions(tensor) or not tensor.numel():
            continue
        # Some eight-bit formats have no isfinite.
        wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        elements += tensor.numel()
        nonfinite = wide.isfinite().logical_not()
        if not bool(nonfinite.any()):
            continue
        nans_here = int(wide.isnan().sum())
        nans, infinities = nans + nans_here, infinities + int(nonfinite.sum()) - nans_here
        index = index or tuple(int(position) for position in nonfinite.nonzero()[0])
    return (nans, infinities, elements, index) if nans + infinities else None
