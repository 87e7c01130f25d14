"""Rules, proved: the real operator whole and in pieces, for every signature of every rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.harness import in_turn, sliced
from tests.passes import samples, samples_torch
from tests.passes.samples import Zeros
from zerograph._torch import fake_mode, graph_module, pytree
from zerograph.ir.mesh import line
from zerograph.ir.metadata import Role
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Signature, Split
from zerograph.ir.zero import OFF
from zerograph.passes import rules
from zerograph.passes.context import BatchLayout, Context
from zerograph.passes.lower.localize import localize
from zerograph.passes.rules import registry

aten = torch.ops.aten
Made = tuple[fx.GraphModule, fx.Node, list[Tensor]]


def graph_of(operator: Any, args: Any, kwargs: Any) -> Made:
    """A step graph of one operator, and the tensors for its inputs."""
    graph, tensors = fx.Graph(), []
    mode = fake_mode()

    def enter(value: Any) -> Any:
        if isinstance(value, Zeros):
            with mode:
                zeros = graph.call_function(aten.full.default, (list(value.shape), 0), {"dtype": torch.float64})
                zeros.meta["val"] = real(value)
            return zeros
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(tensors)}")
        with mode:
            fake = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        node.meta |= {"val": fake, "role": Role("input", str(len(tensors)))}
        tensors.append(value)
        return node

    args, kwargs = pytree.tree_map(enter, (args, kwargs))
    node = graph.call_function(operator, tuple(args), kwargs)
    fakes = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = operator(*fakes[0], **fakes[1])
    graph.output((node,))
    return graph_module(torch.nn.Module(), graph), node, tensors


def copy_of(made: Made) -> Made:
    """The same operator in a graph of its own, which may be changed."""
    module, node, tensors = made
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for one in module.graph.nodes:
        copies[one] = graph.node_copy(one, copies.__getitem__)
    return graph_module(torch.nn.Module(), graph), copies[node], tensors


def real(value: Any) -> Any:
    """An argument as the whole operator takes it, its own to write to."""
    if isinstance(value, Zeros):
        return torch.zeros(value.shape, dtype=torch.float64)
    return value.clone() if isinstance(value, Tensor) else value


def pieces(value: Tensor, sbp: Sbp, ranks: int) -> list[Tensor]:
    """Return each rank's part of ``value``."""
    if isinstance(sbp, Split):
        return [piece.contiguous() for piece in value.chunk(ranks, sbp.dim)]
    if isinstance(sbp, PartialSum):
        parts = [torch.randn(value.shape, dtype=torch.float64).to(value.dtype) for _ in range(ranks - 1)]
        return [*parts, value - sum(parts)]
    return [value.clone() for _ in range(ranks)]


def joined(parts: list[Any], sbp: Sbp) -> Any:
    """The global tensor of which each rank holds a part."""
    if isinstance(sbp, Split):
        return torch.cat(parts, sbp.dim)
    if isinstance(sbp, PartialSum):
        return sum(parts[1:], parts[0])
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def run_in_pieces(made: Made, signature: Signature, ranks: int) -> list[Tensor]:
    """The operator's outputs, computed by ``ranks`` ranks under ``signature``."""
    outputs = []
    for rank in range(ranks):
        module, tensors = local_outputs(made, signature, ranks, rank)
        # Not torch.manual_seed(), which notes down where it was called for every kind of device there may be.
        torch.default_generator.manual_seed(0)
        local = [
            pieces(value, argument.meta["sbp"][0], ranks)[rank]
            for value, argument in zip(tensors, module.graph.find_nodes(op="placeholder"), strict=True)
        ]
        outputs.append([v for v in pytree.tree_leaves(fx.Interpreter(module).run(*local)) if isinstance(v, Tensor)])
    return [joined(list(parts), sbp) for parts, sbp in zip(zip(*outputs, strict=True), signature.outputs, strict=True)]


SAMPLES = {**samples.SAMPLES, **samples_torch.SAMPLES}


def local_outputs(made: Made, signature: Signature, ranks: int, rank: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph of the operator on this rank's shapes, which ``localize`` checks, and the tensors for its inputs."""
    module, node, tensors = copy_of(made)
    given = rules.tensor_arguments(node)
    for argument, sbp in zip(given, signature.inputs, strict=True):
        argument.meta["sbp"] = (sbp,)
    node.meta["signature"] = (signature,)
    found = [(sbp,) for sbp in signature.outputs]
    node.meta["sbp"] = found[0] if isinstance(node.meta["val"], Tensor) else tuple(found)
    batch = BatchLayout(tuple((sbp,) for sbp in signature.inputs))
    localize(module, Context(line(ranks, rank, "none"), OFF, (), {}, batch))
    return module, tensors


CASES = [(operator, number) for operator, samples in SAMPLES.items() for number in range(len(samples))]


@sliced("operator, number, ranks", *in_turn(CASES, (2, 4)))
def test_every_signature_computes_what_the_whole_operator_computes(operator: Any, number: int, ranks: int) -> None:
    args, kwargs = SAMPLES[operator][number]
    given = pytree.tree_map(real, (args, kwargs))
    whole = [v for v in pytree.tree_leaves(operator(*given[0], **given[1])) if isinstance(v, Tensor)]
    made = graph_of(operator, args, kwargs)
    _, node, _ = made
    found = rules.signatures_of(node, ranks)
    assert found
    for signature in found:
        if not _floating(node, signature):
            continue
        result = run_in_pieces(made, signature, ranks)
        for one, other in zip(result, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m: f"{signature}: {m}")  # noqa: B023


def _floating(node: fx.Node, signature: Signature) -> bool:
    """Random partial sums are of floating point numbers."""
    pairs = zip(rules.tensor_arguments(node), signature.inputs, strict=True)
    return all(given.meta["val"].is_floating_point() for given, sbp in pairs if isinstance(sbp, PartialSum))


def test_every_rule_has_samples() -> None:
    assert set(registry.operators_with_rules()) - set(SAMPLES) - set(SHAPE_PROVED) == set()


def _attended(name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of an accelerator's attention and of its backward, of shapes only."""
    q, k, v = (torch.empty(4, 2, 8, 16, dtype=torch.bfloat16, device="meta") for _ in range(3))
    bias = torch.empty(4, 2, 8, 8, dtype=torch.bfloat16, device="meta")
    state = torch.empty((), dtype=torch.int64, device="meta")
    if name == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
        return (q, k, v), (out, q, k, v, out, lse, None, None, 8, 8, 0.0, False, state, state)
    if name == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
        masks = [True, True, True, False]
        return (q, k, v, bias, True), (out, q, k, v, bias, out, lse, state, state, 0.0, masks)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True)
    return (q, k, v, bias, True), (out, q, k, v, out, lse, state, state, bias, None, None, 8, 8, 0.0, False)


# Kernels of accelerators only: that pieces compute what the whole does is shown of the CPU's kernel, which has the same
# factors; here, that pieces have the shapes that the rule says.
SHAPE_PROVED = {
    getattr(aten, f"_scaled_dot_product_{name}_attention{suffix}").default: _attended(name)[number]
    for name in ("flash", "efficient", "cudnn")
    for number, suffix in enumerate(("", "_backward"))
}


@pytest.mark.parametrize("operator", SHAPE_PROVED, ids=str)
def test_pieces_of_an_accelerators_operator_have_the_shapes_of_the_rule(operator: Any) -> None:
    args = SHAPE_PROVED[operator]
    made = graph_of(operator, args, {})
    found = rules.signatures_of(made[1], 2)
    assert found
    split = [one for one in found if any(isinstance(sbp, Split) for sbp in one.inputs)]
    assert {one.inputs[0] for one in split} == {Split(0), Split(1)}
    for signature in found:
        local_outputs(made, signature, 2, 0)


@pytest.mark.parametrize(
    ("operator", "args", "wanted"),
    [
        (aten.mm.default, (4, 4), {"S(0), B -> S(0)", "B, S(1) -> S(1)", "S(1), S(0) -> P", "P, B -> P", "B, P -> P"}),
        (aten.add.Tensor, (4, 4), {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P, P -> P"}),
        (aten._softmax.default, (4, 1, False), {"S(0) -> S(0)"}),
        (aten.sum.default, (4,), {"S(0) -> P", "S(1) -> P", "P -> P"}),
        (aten.exp.default, (4,), {"S(0) -> S(0)", "S(1) -> S(1)"}),
    ],
)
def test_a_rule_yields_these_signatures(operator: Any, args: tuple[Any, ...], wanted: set[str]) -> None:
    tensors = sum(value == 4 for value in args)
    given = (*[torch.randn(4, 4) for _ in range(tensors)], *args[tensors:])
    _, node, _ = graph_of(operator, given, {})
    found = rules.signatures_of(node, 2)
    assert found is not None
    shown = {f"{', '.join(map(str, one.inputs))} -> {', '.join(map(str, one.outputs))}" for one in found}
    assert shown == wanted | {f"{', '.join(['B'] * tensors)} -> B"}


def test_an_uneven_dimension_is_not_split() -> None:
    _, node, _ = graph_of(aten.exp.default, (torch.randn(7, 6),), {})
    found = rules.signatures_of(node, 4)
    assert found is not None
    assert found == (Signature((Broadcast(),), (Broadcast(),)),)
