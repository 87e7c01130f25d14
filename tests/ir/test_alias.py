"""Compare the alias analysis with the storages of real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.inspection.models import prepared
from zerograph.ir.alias import base_of, shared_arguments, viewed
from zerograph.runtime.backends.pieces import memory_owners as memory_of_pieces

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)

# Each with a schema of another kind: views, parts of a list, views and copies that schemas do not declare, in place.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: aten.view.default(x, [6, 4]),
    "transpose": lambda x: aten.t.default(x),
    "split": lambda x: aten.split.Tensor(x, 2),
    "split_with_sizes": lambda x: aten.split_with_sizes.default(x, [1, 3]),
    "unbind": lambda x: aten.unbind.int(x),
    "unsafe_split": lambda x: aten.unsafe_split.Tensor(x, 2),
    "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes.default(x, [1, 3]),
    "_unsafe_view": lambda x: aten._unsafe_view.default(x, [24]),
    "reshape that is a view": lambda x: aten.reshape.default(x, [24]),
    "reshape that copies": lambda x: aten.reshape.default(aten.t.default(x), [24]),
    "contiguous already": lambda x: aten.contiguous.default(x),
    "contiguous that copies": lambda x: aten.contiguous.default(aten.t.default(x)),
    "clone": lambda x: aten.clone.default(x),
    "add in place": lambda x: aten.add_.Tensor(aten.mul.Tensor(x, 2), 1),
    "maximum of a dimension": lambda x: aten.max.dim(x, 0),
    "wait_tensor": lambda x: torch.ops._c10d_functional.wait_tensor.default(x),
}


def storages(value: Any) -> list[int]:
    """Return the address of the storage of each tensor of a value."""
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def calls(call: Callable[[Tensor], Any]) -> list[fx.Node]:
    """Trace a function and return its operators, each with its real value."""
    graph = fx.symbolic_trace(call)

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Noting(graph).run(X.clone())
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert nodes
    return nodes


def shares(node: fx.Node) -> Sequence[bool]:
    """Return for each result whether it shares the storage of the node's first argument."""
    (source,) = storages(node.all_input_nodes[0].meta["val"])
    return [address == source for address in storages(node.meta["val"])]


def predicted_shares(node: fx.Node) -> Sequence[bool]:
    """Return the same according to the alias analysis."""
    shared = shared_arguments(node)
    results = len(storages(node.meta["val"]))
    return [bool(shared) and shared[min(n, len(shared) - 1)] is not None for n in range(results)]


@pytest.mark.parametrize("name", CALLS)
def test_shared_arguments_are_those_whose_storage_a_result_has(name: str) -> None:
    for node in calls(CALLS[name]):
        assert predicted_shares(node) == shares(node), node.format_node()


@pytest.mark.parametrize("name", CALLS)
def test_what_shares_its_arguments_storage_is_a_view_a_write_or_a_wait(name: str) -> None:
    """``viewed`` may claim more than there is, for some strides, and never less."""
    for node in calls(CALLS[name]):
        if any(shares(node)) and name not in ("add in place", "wait_tensor"):
            assert viewed(node) is node.all_input_nodes[0], node.format_node()
    assert viewed(calls(CALLS["clone"])[0]) is None


@pytest.mark.parametrize("split", [aten.split.Tensor, aten.unsafe_split.Tensor])
def test_a_part_of_a_split_has_the_memory_of_the_whole(split: Any) -> None:
    graph = make_fx(lambda x: split(x.mul(2), 2)[1].sin())(X).graph
    (part,) = [node for node in graph.nodes if node.name.startswith("getitem") and node.users]
    (whole,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert base_of(part) is whole
    assert list(shared_arguments(part)) == [whole]


def test_a_piece_sees_a_write_under_an_undeclared_view() -> None:
    """A kernel must not move a write to a tensor across a reader of its ``_unsafe_view``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    base = graph.call_function(aten.mul.Tensor, (x, 2))
    view = graph.call_function(aten._unsafe_view.default, (base, [24]))
    written = graph.call_function(aten.add_.Tensor, (base, 1))
    reader = graph.call_function(aten.sin.default, (view,))
    graph.output((written, reader))
    for node in graph.nodes:
        node.meta |= {"role": None} if node.op == "placeholder" else {}
    x.meta.pop("role")
    memory = memory_of_pieces(graph)
    assert memory[view] is memory[written] is base


@pytest.mark.parametrize("stage", [0, 3])
def test_every_view_of_a_step_has_a_base(stage: int) -> None:
    graph = prepared(stage=stage).graph.graph
    views = [node for node in graph.nodes if viewed(node) is not None]
    assert views
    for node in views:
        assert viewed(base_of(node)) is None
