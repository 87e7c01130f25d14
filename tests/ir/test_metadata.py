"""``NodeMeta`` is the whole table of metadata keys: in the sources, and in graphs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx

from tests.inspection.models import prepared
from zerograph.errors import VerificationError
from zerograph.ir.metadata import NodeMeta, Origin
from zerograph.ir.rewrite import emit
from zerograph.passes.pipeline import stages

ROOT = Path(__file__).parents[2]
KNOWN = NodeMeta.__required_keys__ | NodeMeta.__optional_keys__
# Keys of torch's own tracing. Capture turns "custom" into "origin" and "recomputed".
OF_TORCH = {
    "custom",
    "from_node",
    "nn_module_stack",
    "original_aten",
    "partitioner_tag",
    "seq_nr",
    "source_fn_stack",
    "stack_trace",
    "tensor_meta",
    "unbacked_bindings",
    "user_visible_output_idxs",
}


def keys_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and key of every constant key with which ``.meta`` or ``meta(node)`` is read or written."""

    def is_meta(value: ast.expr) -> bool:
        if isinstance(value, ast.Call):
            return isinstance(value.func, ast.Name) and value.func.id == "meta"
        return isinstance(value, ast.Attribute) and value.attr == "meta"

    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            first = node.args[:1]
            keys = [*first[0].keys] if first and isinstance(first[0], ast.Dict) else [*first]
        elif isinstance(node, ast.AugAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if isinstance(node.value, ast.Dict) and is_meta(target):
                keys = [*node.value.keys]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield node.lineno, key.value


def test_every_key_in_the_sources_is_in_the_table() -> None:
    unknown, used = [], set()
    for folder in ("zerograph", "passes", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for line, key in keys_in(ast.parse(path.read_text())):
                used.add(key)
                if key not in KNOWN | OF_TORCH:
                    unknown.append(f"{path.relative_to(ROOT)}:{line}: {key}")
    assert not unknown
    assert len(used & KNOWN) > 20


def test_every_key_is_documented() -> None:
    documented = {line.strip().partition(":")[0] for line in (NodeMeta.__doc__ or "").splitlines() if ": " in line}
    assert documented >= KNOWN


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_graphs_have_no_other_keys_after_any_pass(micro_batches: int) -> None:
    step = prepared(micro_batches=micro_batches, stage=3)
    for name, module in stages(step.captured.graph, step.context):
        for node in module.graph.nodes:
            assert set(node.meta) <= KNOWN | OF_TORCH, (name, node)


def test_a_node_without_an_sbp_cannot_be_added_to_a_placed_graph() -> None:
    graph: fx.Graph = prepared().emitted
    source = next(node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    with graph.inserting_before(graph.output_node()):
        with pytest.raises(VerificationError, match="without an SBP"):
            emit(graph, torch.ops.aten.neg.default, (source,), Origin("update"))
        added = emit(graph, torch.ops.aten.neg.default, (source,), Origin("update"), like=source)
    assert added.meta["sbp"] == source.meta["sbp"]
