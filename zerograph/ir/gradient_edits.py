"""Gradient edits: what a step does to a gradient between ``backward()`` and the update.

Clipping by norm or value, scaling and adding a multiple of the parameter are pointwise over the gradient's shape, with
0-d tensors as further operands. Such an *edit* has the same result on a flat bucket as on each gradient. Parameters
with equal edits may therefore share a bucket: raw gradients are reduced, and each rank edits its shard of the bucket
once. Other edits are computed for each gradient, on whole gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.base import source
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure
from zerograph.ir.step_graph import found_infs, inputs_by_name, output_nodes, placeholders

aten = torch.ops.aten


@torch.library.custom_op("zerograph::total_norm", mutates_args=())
def _total_norm(tensors: Sequence[Tensor], p: float) -> Tensor:
    """Return the p-norm of all tensors as one vector, 0-d. ``flatten`` expands this node."""
    norms = [torch.linalg.vector_norm(tensor, p) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), p)
    return total


@_total_norm.register_fake
def _(tensors: Sequence[Tensor], p: float) -> Tensor:
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    # The norm of complex numbers is real.
    return tensors[0].new_empty((), dtype=wide.to_real())


TOTAL_NORM = torch.ops.zerograph.total_norm.default

# Stands for an edit that cannot be computed on a flat bucket.
_PER_PARAMETER = "per parameter"


@dataclass(frozen=True, eq=False)
class Edited:
    """A gradient and its edit.

    Attributes:
        raw: the gradient that is reduced, at which the edit starts.
        final: the gradient that the update reads: ``raw`` itself, or the end of a pointwise edit.
        parameter: the placeholder of the parameter.
        norms: for each total norm over the gradient, the edited gradient that is its operand.
        key: equal for parameters whose edits and norms are one computation on a flat bucket.
    """

    raw: fx.Node
    final: fx.Node
    parameter: fx.Node
    norms: Mapping[fx.Node, fx.Node]
    key: tuple[str, Hashable]

    @property
    def on_bucket(self) -> bool:
        """True if the edit is computed on a flat bucket, not on this gradient alone."""
        return self.key[0] != _PER_PARAMETER


def edited_gradients(graph: fx.Graph) -> dict[str, Edited]:
    """Return the gradients of the captured graph with their edits, by the parameter's name."""
    parameters = inputs_by_name(graph, "parameter")
    finals = _final_gradients(graph)
    edits = _Edits()
    raws, keys = {}, {}
    for name, final in finals.items():
        raws[name], keys[name] = edits.read(final, parameters[name]) or (final, _PER_PARAMETER)
    norms: dict[str, dict[fx.Node, fx.Node]] = {name: {} for name in finals}
    norm_keys: dict[str, list[tuple[int, str]]] = {name: [] for name in finals}
    owners: dict[fx.Node, list[str]] = {}
    for name, raw in raws.items():
        owners.setdefault(raw, []).append(name)
    for number, norm in enumerate(graph.find_nodes(op="call_function", target=TOTAL_NORM)):
        for term in norm_terms(norm):
            # Two parameters may have the same gradient: each counts for one occurrence of it.
            for name in owners.get(edits.raw_of(term), []):
                edit = edits.read(term, parameters[name])
                if norm not in norms[name] and edit is not None:
                    norms[name][norm] = term
                    norm_keys[name].append((number, edit[1]))
                    break
    return {
        name: Edited(raws[name], final, parameters[name], norms[name], (keys[name], tuple(norm_keys[name])))
        for name, final in finals.items()
    }


def _final_gradients(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the gradients that the graph returns, by the parameter's name."""
    roles = meta(graph.output_node())["roles"]
    return {r.name: node for node, r in zip(output_nodes(graph), roles, strict=True) if r.kind == "gradient"}


def norm_terms(norm: fx.Node) -> list[fx.Node]:
    """Return the operands of a total norm."""
    terms = norm.args[0]
    assert isinstance(terms, (list, tuple))
    return [term for term in terms if isinstance(term, fx.Node)]


def is_edit(node: fx.Node) -> bool:
    """Return True if ``build()`` computed the node from gradients, after the last ``backward()``."""
    return bool(meta(node).get("edit"))


def mark_edits(graph: fx.Graph) -> None:
    """Mark the nodes that edit gradients, which depend on backward while no backward depends on them.

    Their phase becomes backward.
    """
    # Gradients that an earlier graph has computed are inputs.
    inputs = placeholders(graph, "gradient")
    after: set[fx.Node] = set(inputs)
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (
            origin(node).phase == "backward" or any(operand in after for operand in node.all_input_nodes)
        ):
            after.add(node)
    for node in reversed(list(graph.nodes)):
        if origin(node).phase == "backward" or any(user in before for user in node.users):
            before.add(node)
    for node in after - before - set(inputs):
        meta(node)["edit"] = True
        meta(node)["origin"] = replace(origin(node), phase="backward")


def join_mixed_overflows(graph: fx.Graph, trained: Mapping[str, Collection[str]]) -> None:
    """Make an optimizer skip its update for overflows of other optimizers' gradients that edit its own.

    A norm over the gradients of several optimizers, for instance, is then not finite, and so are the gradients that it
    scales.

    Args:
        graph: the captured graph.
        trained: the names of each optimizer's parameters.
    """
    flags = found_infs(graph)
    if len(flags) < 2:
        return
    raws = {optimizer: set(_scaled_gradients(flag)) for optimizer, flag in flags.items()}
    finals = _final_gradients(graph)
    joined: dict[fx.Node, fx.Node] = {}
    for optimizer, flag in flags.items():
        reached = _edited_from(node for name, node in finals.items() if name in trained[optimizer])
        others = [
            flags[other] for other, terms in raws.items() if other != optimizer and (terms - raws[optimizer]) & reached
        ]
        for other in others:
            with graph.inserting_before(graph.output_node()):
                both = graph.call_function(aten.maximum.default, (joined.get(flag, flag), other))
            both.meta |= flag.meta
            joined[flag] = both
    output = graph.output_node()
    output.args = (tuple(joined.get(node, node) for node in output_nodes(graph)),)


def _scaled_gradients(flag: fx.Node) -> list[fx.Node]:
    """Return the scaled gradients that an overflow flag is computed from."""
    node = flag
    while node.target is not TOTAL_NORM:
        node = node.all_input_nodes[0]
    return norm_terms(node)


def _edited_from(finals: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes at which the edits that end in ``finals`` start."""
    reached = closure(finals, lambda node: node.all_input_nodes if is_edit(node) else ())
    return {node for node in reached if not is_edit(node)}


def has_shape(node: fx.Node, shape: Sequence[int]) -> bool:
    """Return True if the node's value is a tensor of this shape."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def gradient_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of an edit that may be gradients: those of its shape. The others are 0-d numbers."""
    shape = node.meta["val"].shape
    operands = [operand for operand in node.all_input_nodes if has_shape(operand, shape)]
    # If the gradient is 0-d, numbers have its shape, too: the gradient is the first operand.
    return operands if shape else operands[:1]


class _NotPointwiseError(Exception):
    """The edit is not pointwise over one gradient's shape."""


@dataclass
class _Edits:
    """A reader of edits from the graph, with a cache of what numbers depend on."""

    _sources: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    _numbers: dict[fx.Node, str] = field(default_factory=dict)

    def read(self, final: fx.Node, parameter: fx.Node) -> tuple[fx.Node, str] | None:
        """Return the raw gradient that ``final`` is a pointwise edit of, and the edit as text; None for other edits."""
        reading = _Reading(parameter)
        try:
            text = self._read(final, reading)
        except _NotPointwiseError:
            return None
        if len(reading.raws) != 1:
            return None
        raw = next(iter(reading.raws))
        # A number computed from this gradient needs it whole; only total norms are computed from flat buckets.
        if any(raw in self._sources_of(number) for number in reading.numbers):
            return None
        return raw, text

    def raw_of(self, term: fx.Node) -> fx.Node:
        """Return the start of the edit that ends in ``term``, through first operands."""
        while is_edit(term) and (operands := gradient_operands(term)):
            term = operands[0]
        return term

    def _read(self, node: fx.Node, reading: _Reading) -> str:
        shape = reading.parameter.meta["val"].shape
        if node is reading.parameter:
            return "parameter"
        if node.target is aten.full.default and has_shape(node, shape):
            return f"full({node.args[1]}, {dict(node.kwargs)})"
        if not has_shape(node, shape):
            if not has_shape(node, ()):
                raise _NotPointwiseError
            reading.numbers.add(node)
            return self._number(node)
        if not is_edit(node):
            reading.raws.add(node)
            return "gradient"
        if not _is_pointwise(node):
            raise _NotPointwiseError
        gradients = set(gradient_operands(node))
        texts: dict[fx.Node, str] = {}
        for operand in node.all_input_nodes:
            if operand in gradients:
                texts[operand] = self._read(operand, reading)
            else:
                if not has_shape(operand, ()):
                    raise _NotPointwiseError
                reading.numbers.add(operand)
                texts[operand] = self._number(operand)
        return _call(node, texts)

    def _number(self, node: fx.Node) -> str:
        """Return the text of a 0-d tensor; equal texts mean equal numbers."""
        if node not in self._numbers:
            numbers = all(has_shape(operand, ()) for operand in node.all_input_nodes)
            if node.op == "get_attr" and node.graph.owning_module is not None:
                self._numbers[node] = f"constant {getattr(node.graph.owning_module, str(node.target))}"
            elif node.op == "call_function" and numbers and _is_pointwise(node):
                self._numbers[node] = _call(node, {operand: self._number(operand) for operand in node.all_input_nodes})
            else:
                self._numbers[node] = node.name
        return self._numbers[node]

    def _sources_of(self, number: fx.Node) -> frozenset[fx.Node]:
        """Return the starts of the edits that ``number`` is computed from, except through total norms."""
        if number not in self._sources:
            reached = closure(
                [number],
                lambda node: node.all_input_nodes if is_edit(node) and node.target is not TOTAL_NORM else (),
            )
            self._sources[number] = frozenset(node for node in reached if not is_edit(node))
        return self._sources[number]


@dataclass
class _Reading:
    """The raw gradients and numbers of one edit."""

    parameter: fx.Node
    raws: set[fx.Node] = field(default_factory=set)
    numbers: set[fx.Node] = field(default_factory=set)


# Copies and fills are elementwise, but have no pointwise tag.
_ELEMENTWISE = {aten.clone.default, aten.copy.default, aten.alias.default, aten.detach.default, aten._to_copy.default}
_ELEMENTWISE |= {aten.lift_fresh_copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default}
_ELEMENTWISE |= {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}
_ELEMENTWISE |= {aten.copy_.default, aten.fill_.Scalar, aten.zero_.default}


def is_elementwise(target: object) -> bool:
    """Return whether each element of the operator's result depends only on that element of its operands."""
    return target in _ELEMENTWISE or (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags)


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    # Memory formats such as channels_last need several dimensions, and a flat bucket has one.
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return False
    return is_elementwise(target)


def _call(node: fx.Node, texts: Mapping[fx.Node, str]) -> str:
    args, kwargs = fx.map_arg((node.args, node.kwargs), texts.__getitem__)
    return f"{node.target}({args}, {kwargs})"


def total_norm(
    tensors: Sequence[Tensor], p: float, error_if_nonfinite: bool, checked: list[Tensor] | None
) -> Tensor | None:
    """Return the total norm as the operator that ``flatten`` expands, in place of ``torch.nn.utils.get_total_norm``.

    Args:
        tensors: the gradients.
        p: the order of the norm.
        error_if_nonfinite: the norm must be finite.
        checked: takes a norm that must be finite; None if the step cannot check it.

    Returns:
        The norm, 0-d; None for orders that torch computes itself.

    Raises:
        CaptureError: there are no gradients, or the norm must be finite and cannot be checked.
    """
    if not tensors:
        raise source.refusal(
            "there is no gradient to take a norm of",
            "Call backward() before, and pass parameters of the graph's modules as build() sees them "
            "(self.model.parameters(); a list that was made outside build() holds others).",
        )
    # Torch has special cases for other orders.
    norm = TOTAL_NORM(list(tensors), p) if p > 0 else None
    if error_if_nonfinite:
        if norm is None or checked is None:
            raise source.refusal(
                f"error_if_nonfinite=True with a scaled loss, or a norm of order {p}, reads the norm while the step is "
                "being traced",
                'Leave it out, and set config.checks.on_nonfinite = "raise": an error before any state changes.',
            )
        checked.append(norm)
    return norm
