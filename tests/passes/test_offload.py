"""Where the emitted graph reads and writes files."""

from __future__ import annotations

import functools
import tempfile

import torch
from torch import fx

import zerograph as zg
from tests.harness import sliced
from tests.models import TrainStep, batches, make
from zerograph.ir.mesh import line
from zerograph.ir.metadata import origin, role
from zerograph.ir.step_graph import nbytes
from zerograph.ops.offload import FETCH, WAIT_TRANSFER, WRITE_BACK


@functools.cache
def emitted(stage: int, *, parameters: bool) -> fx.Graph:
    """Prepare the step of rank 0 of 2, in many buckets. Nobody may change it."""
    folder = tempfile.gettempdir()
    model = make("gpt")
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), fused=True), stage, bucket_size=2**13)
    files = zg.OffloadTo("nvme", folder)
    step.config.memory.offload = zg.Offload(optimizer=files, parameters=files if parameters else None)
    return step.prepare(line(2, 0, "ranks"), *batches("gpt", 1)[0]).graph.graph


def spans(graph: fx.Graph) -> list[tuple[fx.Node, int, int]]:
    """Return each read of a file, from its start to the last node that needs its memory."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    return [
        (node, order[node], max(order[user] for user in node.users))
        for node in graph.find_nodes(op="call_function", target=FETCH)
    ]


def bucket(node: fx.Node) -> str:
    found = role(node.all_input_nodes[0])
    assert found is not None
    return found.name.split(".")[0]


@sliced("stage, parameters", [(2, False), (3, True)], [(0, False)])
def test_no_more_than_three_buckets_are_in_memory(stage: int, parameters: bool) -> None:
    graph = emitted(stage, parameters=parameters)
    found = spans(graph)
    assert len({bucket(node) for node, _, _ in found}) > 10
    for position in range(len(graph.nodes)):
        assert len({bucket(node) for node, start, end in found if start <= position <= end}) <= 3


def test_the_next_bucket_is_read_and_the_last_one_written_while_one_is_updated() -> None:
    graph = emitted(2, parameters=False)
    order = {node: index for index, node in enumerate(graph.nodes)}
    updates = [node for node in graph.nodes if "_fused_adamw_" in str(node.target)]
    reads = {bucket(node): node for node in graph.find_nodes(op="call_function", target=FETCH)}
    writes = {bucket(node): node for node in graph.find_nodes(op="call_function", target=WRITE_BACK)}
    landings: dict[fx.Node, list[int]] = {}
    for node in graph.find_nodes(op="call_function", target=WAIT_TRANSFER):
        landings.setdefault(node.all_input_nodes[0], []).append(order[node])
    ours = [next(name for name, read in reads.items() if read in node.all_input_nodes) for node in updates]
    for before, update, this, after in zip(ours, updates[1:], ours[1:], ours[2:], strict=False):
        assert order[reads[this]] < order[update] < order[writes[this]]
        assert order[reads[after]] < order[update] < landings[reads[after]][0]
        assert order[writes[before]] < order[update] < landings[reads[before]][1]


def test_the_first_read_starts_in_backward_and_does_not_raise_the_peak() -> None:
    graph = emitted(2, parameters=False)
    first = next(node for node in graph.nodes if node.target is FETCH)
    assert origin(first.next.next).phase == "backward"


def test_each_gather_reads_its_shard_anew_and_only_the_update_writes() -> None:
    graph = emitted(3, parameters=True)
    shards = [node for node in graph.nodes if node.target is FETCH and role(node.all_input_nodes[0]).kind == "bucket"]
    written = {node.args[1] for node in graph.find_nodes(op="call_function", target=WRITE_BACK)}
    by_bucket: dict[str, list[fx.Node]] = {}
    for node in shards:
        by_bucket.setdefault(bucket(node), []).append(node)
    # For forward, for backward, and for the update; a layer that both ends of the step use is gathered once.
    assert {len(reads) for reads in by_bucket.values()} <= {2, 3}
    for reads in by_bucket.values():
        assert [read in written for read in reads] == [False] * (len(reads) - 1) + [True]


def test_handles_are_all_that_rests_in_memory() -> None:
    graph = emitted(3, parameters=True)
    at_rest = [node for node in graph.find_nodes(op="placeholder") if role(node).kind in ("bucket", "state")]
    assert max(nbytes(node.meta["val"]) for node in at_rest) <= 8
