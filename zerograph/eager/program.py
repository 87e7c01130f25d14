"""Programs: operators on global tensors, compiled to calls on this rank's parts.

An operator is traced, placed, boxed and localized by the passes of a step. So it splits, communicates and rounds as it
does in a graph. What stays one operator is called directly, on parts that are boxed first; what is decomposed runs as a
small graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload, pytree
from zerograph.capture import decompositions
from zerograph.errors import PlacementError
from zerograph.ir.buckets import from_whole_vector
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.mesh import most_slices, with_slices
from zerograph.ir.metadata import Role, boxing_of, meta
from zerograph.ir.rewrite import first_computed
from zerograph.ir.sbp import NdSbp, PartialSum, Split, broadcast, show
from zerograph.ir.step_graph import output_nodes, placeholders, restore_origins
from zerograph.ir.zero import OFF
from zerograph.passes.context import BackendTraits, BatchLayout, Context, MissingRules
from zerograph.passes.pipeline import PIPELINE, Pass, apply_pass, finalize
from zerograph.passes.placement.place import needed
from zerograph.runtime.executor import failed_lines, failed_node
from zerograph.runtime.job.differences import READING
from zerograph.runtime.job.process_group import Job, agree, communication_error, digest
from zerograph.runtime.wire.selection import Transport

aten = torch.ops.aten


def _passes(*names: str) -> list[Pass]:
    return [entry for entry in PIPELINE if entry.name in names]


_PLACING = _passes("simplify", "offsets", "unfuse", "repeat_key_heads", "batch_first", "split_micro_batches", "place")
_LOWERING = _passes("box", "hoist_batch_statistics", "localize", "loop", "add_in_tree", "lower_to_p2p")


@dataclass(frozen=True, eq=False)
class Spec:
    """Metadata of a global tensor. Equal ones are one object; see :meth:`World.spec`.

    Attributes:
        shape: the global shape.
        stride: strides of the whole tensor.
        dtype: the dtype.
        device: the device of this rank's part.
        sbp: one SBP per mesh dimension.
        rows: number of rows of each rank, where it differs between ranks; see :class:`zerograph.ir.mesh.Mesh`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sbp: NdSbp
    rows: tuple[int, ...] | None

    def fake(self) -> Tensor:
        """Return an empty tensor like the whole tensor; inside a fake mode, a fake one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled operator on global tensors.

    Attributes:
        run: takes this rank's parts, and returns this rank's results. It writes to the parts that the operator writes.
        outputs: what the operator returns, with metadata in place of tensors; other results are None.
        needs: the SBP in which ``run`` takes each argument; None: as they come.
        arguments: positional and keyword arguments of one operator, with ``Slot`` in place of tensors. None: ``run``
            takes the tensors only.
        keeps_arguments: these are the arguments of the call.
        rows: number of rows of each rank, where it differs.
        is_direct: ``run`` takes the arguments of the call as they come, with this rank's parts in place of tensors.
        compares: ``run`` compares ``history``, what a tensor was computed by, between ranks before they exchange parts.
    """

    run: Callable[..., Any]
    outputs: Any
    needs: tuple[NdSbp, ...] | None = None
    arguments: tuple[Any, Any] | None = None
    keeps_arguments: bool = False
    rows: tuple[int, ...] | None = None
    is_direct: bool = False
    compares: bool = False


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among others: arguments, or parts of a result."""

    index: int


@dataclass(frozen=True)
class Compilation:
    """Compiles programs.

    Attributes:
        job: the ranks.
        transport: how they exchange tensors.
        warn: shows a message about an operator without a rule.
        spec: returns the one object of equal metadata.
        slices: ``config.virtual_ranks``: operators compute slice by slice, and no result is partial.
    """

    job: Job
    transport: Transport
    warn: Callable[[str], None]
    spec: Callable[..., Spec]
    slices: int | None = None

    def compile(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Spec],
        outputs: Sequence[NdSbp | None] | None = None,
        operator: OpOverload | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> Program:
        """Compile a function of global tensors.

        Args:
            function: takes tensors, and returns tensors in any nesting. It may write to its arguments.
            inputs: metadata of the arguments.
            outputs: the SBP in which each result is returned; None: in which it is computed.
            operator: the operator that the function calls, if it does nothing else.
            rows: number of rows of each rank, where it differs; by default that of the inputs.

        Raises:
            Exception: no graph computes the function.
        """
        module, result = _traced(function, inputs)
        returned = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
        rows = next((spec.rows for spec in inputs if spec.rows is not None), rows)
        # A view computes nothing. Its placement must be that along slices all the same.
        is_cut = self.slices is not None and operator is not None and not operator.is_view
        micro_batches = most_slices(self.slices, self.job.size) if is_cut and self.slices is not None else 1
        context = Context(
            mesh=replace(with_slices(self.job.mesh, None if is_cut else self.slices), rows=rows),
            policy=OFF,
            buckets=(),
            updates={},
            batch=BatchLayout(
                inputs=tuple(spec.sbp for spec in inputs),
                micro_batches=micro_batches,
                cut=tuple(any(isinstance(one, Split) for one in spec.sbp) for spec in inputs),
                slices=self.slices if is_cut else None,
                outputs=tuple(outputs or [None] * len(returned)),
            ),
            backend=BackendTraits(exchanges=self.transport.exchanges, hosts=self.transport.hosts),
            missing_rules=MissingRules("gather", self.warn),
        )
        placing = context
        if self.slices is not None and not is_cut:
            placing = replace(context, mesh=replace(self.job.mesh, shape=(self.slices,)))
        with _torch.raw_sizes():
            for entry in _PLACING:
                module = apply_pass(entry, module, placing)
            results = module.graph.output_node()
            if is_cut:
                # What is partial could be added once only.
                meta(results)["needs"] = list(map(_complete, meta(results)["needs"]))
            elif outputs is None:
                # What the function adds up itself need not be added again by who reads it.
                read = {pair for node in module.graph.nodes if node is not results for pair in needed(node)}
                meta(results)["needs"] = [
                    whole if (one, whole := _complete(sbp)) in read else sbp for one, sbp in needed(results)
                ]
            single = None if operator is None or is_cut else _single(module.graph, inputs)
            needs = {} if single is None else dict(needed(single))
            before = None if single is None else _described(single)
            numbers = {node: index for index, node in enumerate(placeholders(module.graph))}
            is_written = operator is not None and _torch.is_mutable(operator)
            own = _torch.functional_overload(operator) if operator is not None and is_written else operator
            if single is not None and is_written and single.target is not own:
                single = None
            for entry in _LOWERING:
                module = apply_pass(entry, module, context)
        graph = module.graph
        if is_cut and micro_batches == 1:
            _use_contiguous(graph)
        specs = tuple(
            self.spec(tuple(value.shape), value.stride(), value.dtype, value.device, meta(node)["sbp"], rows)
            for node, value in zip(output_nodes(graph), returned, strict=True)
        )
        for spec in specs if operator is not None else ():
            check_slices(spec.shape, spec.sbp, self.slices)
        remaining = iter(specs)
        nested = pytree.tree_map(lambda leaf: leaf if leaf is None else next(remaining), result)
        for view in (aten.view.default, aten._unsafe_view.default):
            for node in graph.find_nodes(op="call_function", target=view):
                # This rank's part may have other strides than the whole tensor.
                node.target = aten.reshape.default
        if single is not None:
            sbps = [spec.sbp for spec in inputs]
            for node, sbp in needs.items():
                sbps[numbers[node]] = sbp
            slots: Callable[[fx.Node], Any] = lambda node: Slot(numbers[_source(node)])  # noqa: E731
            arguments: Any = fx.map_arg((single.args, single.kwargs), slots)
            keeps = single.target is own and (is_written or _described(single) == before)
            target: Any = operator if keeps else single.target
            return Program(target, nested, tuple(sbps), arguments, keeps, rows)
        module = finalize(module)
        # Reading the code generates it. Until then forward() is a stand-in that calls the whole module, each time.
        assert module.code
        run, compares = module.forward, self.job.size > 1 and any(boxing_of(node) is not None for node in graph.nodes)
        if compares:
            doing = READING if operator is None else f"running {operator}"
            facts = {
                f"tensor {number}": f"{list(spec.shape)} of {spec.dtype}, {show(spec.sbp)}"
                for number, spec in enumerate(inputs)
            }
            run = functools.partial(_after_comparison, self.job, doing, facts, digest(facts), module)
        return Program(run, nested, rows=rows, compares=compares)


def _after_comparison(
    job: Job,
    doing: str,
    facts: Mapping[str, str],
    number: int,
    module: fx.GraphModule,
    *parts: Tensor,
    history: int = 0,
) -> Any:
    """Run a program that exchanges parts once all ranks are about to: one rank alone would wait until its timeout.

    Args:
        history: that of the tensor that is read.

    Raises:
        CommunicationError: an exchange has failed.
    """
    agree(job, doing, number ^ history, lambda: {**facts, "what it was computed by": f"history {history:x}"})
    try:
        return module.forward(*parts)
    except RuntimeError as error:
        node = failed_node(module.graph, failed_lines(error.__traceback__))
        boxing = boxing_of(node) if node is not None else None
        if boxing is None:
            raise
        raise communication_error(job, f"in the {boxing.kind} of {boxing.tensor}, {doing}", error) from error


def _complete(sbp: NdSbp) -> NdSbp:
    return tuple(broadcast if isinstance(one, PartialSum) else one for one in sbp)


def _use_contiguous(graph: fx.Graph) -> None:
    """Have an operator on one slice read and return contiguous tensors, as in a loop over several."""
    split = [node for node in placeholders(graph) if any(isinstance(one, Split) for one in meta(node)["sbp"])]
    results = graph.output_node()
    for node in (*split, *dict.fromkeys(output_nodes(graph))):
        users = [results] if node not in split else list(node.users)
        with graph.inserting_before(first_computed(graph) if node in split else results):
            contiguous = graph.call_function(from_whole_vector, (node,))
        contiguous.meta = dict(node.meta)
        for user in users:
            # A write is to the tensor itself.
            if user.target is not aten.copy_.default or user.args[0] is not node:
                user.replace_input_with(node, contiguous)


def check_slices(shape: Sequence[int], sbp: NdSbp, slices: int | None) -> None:
    """Check that ``config.virtual_ranks``, if it is set, cuts a tensor in slices alike on any number of ranks.

    Raises:
        PlacementError: it does not.
    """
    if slices is None:
        return
    for one in sbp:
        if isinstance(one, PartialSum):
            raise PlacementError(
                f"config.virtual_ranks = {slices}: partial sums of ranks depend on the number of ranks\n"
                "Pass the rows, or the whole sum."
            )
        if isinstance(one, Split) and shape[one.dim] % slices:
            raise PlacementError(
                f"a dimension of size {shape[one.dim]} cannot be split into config.virtual_ranks = {slices} equal "
                "slices\nUse a number of rows that it divides, or a tensor that is whole on all ranks."
            )


def _source(node: fx.Node) -> fx.Node:
    """Return the input that boxing nodes have brought into another SBP."""
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node


def _described(node: fx.Node) -> tuple[Any, ...]:
    """Return the operator of a node, and its arguments without the tensors."""
    return node.target, str(fx.map_arg((node.args, node.kwargs), lambda _: None))


def _single(graph: fx.Graph, inputs: Sequence[Spec]) -> fx.Node | None:
    """Return the only operator of a placed graph that returns or writes what it yields; None for any other graph."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    written = [node for node in calls if node.target is aten.copy_.default]
    operators = [node for node in calls if node.target is not getitem and node not in written]
    if len(operators) != 1 or len(written) > 1 or graph.find_nodes(op="get_attr"):
        return None
    (single,) = operators
    results = [single] if isinstance(single.meta["val"], Tensor) else [node for node in calls if node.target is getitem]
    wants = needed(single)
    if not isinstance(single.target, OpOverload) or len({node for node, _ in wants}) < len(wants):
        # An operator may need one tensor in two SBPs.
        return None
    if not written:
        return single if output_nodes(graph) == results else None
    # It writes in place if its result has the SBP that is stored.
    (write,) = written
    stored = meta(write.all_input_nodes[0])["sbp"]
    in_place = write.all_input_nodes[1] is single and meta(single)["sbp"] == stored
    return single if in_place and dict(wants).get(write.all_input_nodes[0], stored) == stored else None


def _traced(function: Callable[..., Any], inputs: Sequence[Spec]) -> tuple[fx.GraphModule, Any]:
    """Return the functional graph of a function, and what it returns: fake tensors, and None for anything else."""
    result: Any = None

    def flat(*tensors: Tensor) -> list[Tensor]:
        nonlocal result
        result = function(*tensors)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    with _torch.no_modes(), _torch.fake_mode(), torch.no_grad(), _torch.errors_unlogged():
        fakes = [spec.fake() for spec in inputs]
        module = without_mutation(_torch.trace(flat, fakes, decompositions.table()))
    graph = module.graph
    restore_origins(graph)
    for index, node in enumerate(placeholders(graph)):
        meta(node)["role"] = Role("input", str(index))
    returned = [node.meta["val"] for node in output_nodes(graph)]
    meta(graph.output_node())["roles"] = [Role("output", str(index)) for index in range(len(returned))]
    graph.eliminate_dead_code()
    values = iter(returned)
    return module, pytree.tree_map(lambda leaf: next(values) if isinstance(leaf, Tensor) else None, result)
