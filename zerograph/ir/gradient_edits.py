"""What a step does to each gradient between ``backward()`` and the update, and which of it may be done to buckets.

Clipping by norm or value, scaling, adding a multiple of the parameter: all of these are pointwise over the
gradient's shape, with 0-d tensors beside it. Such an *edit* means the same on a flat bucket as on each gradient for
itself, so parameters with equal edits may share a bucket: only the raw gradients are then reduced, and the edit is
made once on what each rank keeps. Every other edit is computed gradient by gradient, on whole gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.ir.metadata import meta, origin, role
from zerograph.ir.rewrite import closure
from zerograph.ir.step_graph import found_infs, output_nodes

aten = torch.ops.aten


@torch.library.custom_op("zerograph::total_norm", mutates_args=())
def _total_norm(tensors: Sequence[Tensor], p: float) -> Tensor:
    """The p-norm of all tensors as one vector: one node of the captured graph, which ``flatten`` takes apart."""
    norms = [torch.linalg.vector_norm(tensor, p) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), p)
    return total


@_total_norm.register_fake
def _(tensors: Sequence[Tensor], p: float) -> Tensor:
    dtypes = [tensor.dtype for tensor in tensors]
    wide = dtypes[0]
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    # The norm of complex numbers is real.
    return tensors[0].new_empty((), dtype=wide.to_real())


TOTAL_NORM = torch.ops.zerograph.total_norm.default

# The words of an edit that no flat bucket can have.
_APART = "apart"


@dataclass(frozen=True, eq=False)
class Edited:
    """A gradient on its way to the update.

    Attributes:
        raw: what is reduced; the edit starts from it.
        final: what the update reads: ``raw`` itself, or the end of a pointwise edit.
        parameter: the placeholder of the parameter.
        norms: by each total norm that the gradient takes part in, the form in which it does.
        key: equal for parameters whose edits and norms are one computation on a flat bucket.
    """

    raw: fx.Node
    final: fx.Node
    parameter: fx.Node
    norms: Mapping[fx.Node, fx.Node]
    key: tuple[str, Hashable]

    @property
    def on_bucket(self) -> bool:
        """Whether the edit is made on a flat bucket, not on this gradient alone."""
        return self.key[0] != _APART


def edited_gradients(graph: fx.Graph) -> dict[str, Edited]:
    """How each gradient that the captured ``graph`` returns was edited, by the parameter's name."""
    parameters = {found.name: node for node in graph.find_nodes(op="placeholder") if (found := role(node)) is not None}
    roles = meta(graph.output_node())["roles"]
    finals = {r.name: n for n, r in zip(output_nodes(graph), roles, strict=True) if r.kind == "gradient"}
    edits = _Edits()
    raws, keys = {}, {}
    for name, final in finals.items():
        raws[name], keys[name] = edits.of(final, parameters[name]) or (final, _APART)
    norms: dict[str, dict[fx.Node, fx.Node]] = {name: {} for name in finals}
    norm_keys: dict[str, list[tuple[int, str]]] = {name: [] for name in finals}
    owners: dict[fx.Node, list[str]] = {}
    for name, raw in raws.items():
        owners.setdefault(raw, []).append(name)
    for number, norm in enumerate(graph.find_nodes(op="call_function", target=TOTAL_NORM)):
        for term in norm_terms(norm):
            # Two parameters may have one and the same gradient: each stands for one occurrence of it.
            for name in owners.get(edits.raw_of(term), []):
                edit = edits.of(term, parameters[name])
                if norm not in norms[name] and edit is not None:
                    norms[name][norm] = term
                    norm_keys[name].append((number, edit[1]))
                    break
    return {
        name: Edited(raws[name], final, parameters[name], norms[name], (keys[name], tuple(norm_keys[name])))
        for name, final in finals.items()
    }


def norm_terms(norm: fx.Node) -> list[fx.Node]:
    """The tensors that a total norm is taken of."""
    terms = norm.args[0]
    assert isinstance(terms, (list, tuple))
    return [term for term in terms if isinstance(term, fx.Node)]


def is_edit(node: fx.Node) -> bool:
    """Whether ``build()`` computed the node after the last ``backward()``, from what that left."""
    return bool(meta(node).get("edit"))


def mark_edits(graph: fx.Graph) -> None:
    """Note which nodes edit gradients: they depend on backward, and no backward depends on them. Phase: backward."""
    behind: set[fx.Node] = set()
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (
            origin(node).phase == "backward" or any(given in behind for given in node.all_input_nodes)
        ):
            behind.add(node)
    for node in reversed(list(graph.nodes)):
        if origin(node).phase == "backward" or any(user in before for user in node.users):
            before.add(node)
    for node in behind - before:
        meta(node)["edit"] = True
        meta(node)["origin"] = replace(origin(node), phase="backward")


def join_mixed_overflows(graph: fx.Graph, trained: Mapping[str, Collection[str]]) -> None:
    """Let an optimizer skip its update also for overflows in gradients of others that its own were edited with.

    A norm over the gradients of several optimizers, say, is then not finite, and so is what it scales.
    """
    numbers = found_infs(graph)
    if len(numbers) < 2:
        return
    raws = {optimizer: set(_terms_of(number)) for optimizer, number in numbers.items()}
    roles = meta(graph.output_node())["roles"]
    finals = {r.name: n for n, r in zip(output_nodes(graph), roles, strict=True) if r.kind == "gradient"}
    joined: dict[fx.Node, fx.Node] = {}
    for optimizer, number in numbers.items():
        reached = _edited_from(node for name, node in finals.items() if name in trained[optimizer])
        others = [
            numbers[other]
            for other, terms in raws.items()
            if other != optimizer and (terms - raws[optimizer]) & reached
        ]
        for other in others:
            with graph.inserting_before(graph.output_node()):
                both = graph.call_function(aten.maximum.default, (joined.get(number, number), other))
            both.meta |= number.meta
            joined[number] = both
    output = graph.output_node()
    output.args = (tuple(joined.get(node, node) for node in output_nodes(graph)),)


def _terms_of(number: fx.Node) -> list[fx.Node]:
    """Return the scaled gradients of whose largest the number says whether it is finite."""
    node = number
    while node.target is not TOTAL_NORM:
        node = node.all_input_nodes[0]
    return norm_terms(node)


def _edited_from(finals: Iterable[fx.Node]) -> set[fx.Node]:
    """Return what the edits that end in ``finals`` start from."""
    reached = closure(finals, lambda node: node.all_input_nodes if is_edit(node) else ())
    return {node for node in reached if not is_edit(node)}


def has_shape(node: fx.Node, shape: Sequence[int]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def gradient_operands(node: fx.Node) -> list[fx.Node]:
    """The inputs of an edit that have its shape, and so may be gradients; the others are the numbers it works with."""
    shape = node.meta["val"].shape
    found = [given for given in node.all_input_nodes if has_shape(given, shape)]
    # Beside a 0-d gradient, a number has the gradient's shape: operators take what they work on first.
    return found if shape else found[:1]


class _NotPointwiseError(Exception):
    """The edit is not pointwise over one gradient's shape."""


@dataclass
class _Edits:
    """Reads edits off the graph, remembering what numbers depend on."""

    _sources: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    _numbers: dict[fx.Node, str] = field(default_factory=dict)

    def of(self, final: fx.Node, parameter: fx.Node) -> tuple[fx.Node, str] | None:
        """The one raw gradient that ``final`` is a pointwise edit of, and the edit in words; None if there is none."""
        reading = _Reading(parameter)
        try:
            words = self._read(final, reading)
        except _NotPointwiseError:
            return None
        if len(reading.raws) != 1:
            return None
        raw = next(iter(reading.raws))
        # A number made from this gradient needs it whole anyway; only a total norm is made from flat ones.
        if any(raw in self._made_from(number) for number in reading.numbers):
            return None
        return raw, words

    def raw_of(self, term: fx.Node) -> fx.Node:
        """Where the edit that ends in ``term`` starts, followed through first operands."""
        while is_edit(term) and (given := gradient_operands(term)):
            term = given[0]
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
        follow = set(gradient_operands(node))
        words: dict[fx.Node, str] = {}
        for given in node.all_input_nodes:
            if given in follow:
                words[given] = self._read(given, reading)
            else:
                if not has_shape(given, ()):
                    raise _NotPointwiseError
                reading.numbers.add(given)
                words[given] = self._number(given)
        return _call(node, words)

    def _number(self, node: fx.Node) -> str:
        """A 0-d tensor in words: the same words, the same number."""
        if node not in self._numbers:
            numbers = all(has_shape(given, ()) for given in node.all_input_nodes)
            if node.op == "get_attr" and node.graph.owning_module is not None:
                self._numbers[node] = f"constant {getattr(node.graph.owning_module, str(node.target))}"
            elif node.op == "call_function" and numbers and _is_pointwise(node):
                self._numbers[node] = _call(node, {given: self._number(given) for given in node.all_input_nodes})
            else:
                self._numbers[node] = node.name
        return self._numbers[node]

    def _made_from(self, number: fx.Node) -> frozenset[fx.Node]:
        """What the edits that ``number`` comes from start from; what stands behind a total norm does not count."""
        if number not in self._sources:
            reached = closure(
                [number],
                lambda node: node.all_input_nodes if is_edit(node) and node.target is not TOTAL_NORM else (),
            )
            self._sources[number] = frozenset(node for node in reached if not is_edit(node))
        return self._sources[number]


@dataclass
class _Reading:
    """What one edit was found to be made of."""

    parameter: fx.Node
    raws: set[fx.Node] = field(default_factory=set)
    numbers: set[fx.Node] = field(default_factory=set)


# Copies and fills work element by element, but carry no pointwise tag.
_ELEMENTWISE = {aten.clone.default, aten.copy.default, aten.alias.default, aten.detach.default, aten._to_copy.default}
_ELEMENTWISE |= {aten.lift_fresh_copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default}


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    # A memory format counts dimensions, which a flat tensor has not.
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return False
    return target in _ELEMENTWISE or torch.Tag.pointwise in target.tags


def _call(node: fx.Node, words: Mapping[fx.Node, str]) -> str:
    args, kwargs = fx.map_arg((node.args, node.kwargs), words.__getitem__)
    return f"{node.target}({args}, {kwargs})"


def total_norm(tensors: Sequence[Tensor], p: float, error_if_nonfinite: bool) -> Tensor | None:
    """Return the total norm as the one operator that ``flatten`` knows; None of orders that torch computes itself."""
    line, code = source.running_line()
    if not tensors:
        raise CaptureError(
            f"there is no gradient to take a norm of\n  {line}   {code}\n"
            "Call backward() before, and pass parameters of the graph's modules as build() sees them "
            "(self.model.parameters(); a list that was made outside build() holds others)."
        )
    if error_if_nonfinite:
        raise CaptureError(
            f"error_if_nonfinite=True reads the norm while the step is being traced\n  {line}   {code}\n"
            "Return the norm from build() and look at it outside."
        )
    # Of other orders torch has special cases: those it computes itself.
    return TOTAL_NORM(list(tensors), p) if p > 0 else None
