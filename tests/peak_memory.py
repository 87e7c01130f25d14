"""Live bytes over a step: of the emitted graph, node by node, and of a running step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import zerograph as zg
from zerograph._torch import pytree
from zerograph.ir.metadata import role

WAIT = torch.ops._c10d_functional.wait_tensor.default


def alive(graph: fx.Graph, made: fx.Node) -> range:
    """The positions at which the memory of ``made`` is held: by it, its views, and a collective in flight on it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    last, stack, seen = order[made], [made], {made}
    while stack:
        for user in stack.pop().users:
            last = max(last, order[user])
            shares = getattr(user.target, "is_view", False) or user.target in (WAIT, torch.ops.aten.copy_.default)
            starts = getattr(user.target, "namespace", "") in ("_c10d_functional", "zerograph")
            if (shares or starts) and user not in seen:
                seen.add(user)
                # The result of a reduction is other memory, but until its wait it holds on to its input.
                stack += [user] if shares and not (user.target is WAIT and _reduces(user)) else []
                last = max([last, *(order[wait] for wait in user.users if wait.target is WAIT)])
    return range(order[made], last + 1)


def _reduces(wait: fx.Node) -> bool:
    return "gather" not in str(wait.all_input_nodes[0].target)


def gathered_buckets(graph: fx.Graph) -> list[tuple[str, range]]:
    """(bucket, positions) of every gather of a bucket: alive from its start, when its memory is taken."""
    found = []
    for node in graph.nodes:
        source = role(node.all_input_nodes[0]) if node.all_input_nodes else None
        if "gather" in str(node.target) and source is not None and source.kind == "bucket":
            found.append((source.name, alive(graph, node)))
    return found


def gradient_buckets(graph: fx.Graph) -> list[tuple[str, range]]:
    """(bucket, positions) of every bucket of whole gradients."""
    return [(node.meta["gradient"], alive(graph, node)) for node in graph.nodes if "gradient" in node.meta]


def most_alive(spans: list[tuple[str, range]], length: int) -> int:
    """How many of the spans overlap at most."""
    return max(sum(position in span for _, span in spans) for position in range(length))


class Live(TorchDispatchMode):
    """``most`` is the bytes of storages that were alive at once, each counted whole and once, given ones included.

    Those on the meta device, fake tensors' too, have none.
    """

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.most, self._known = 0, {}
        self._see(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result

    def _see(self, values: Any) -> None:
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.device.type == "meta":
                    continue
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._known.values()))


def most_alive_bytes(step: zg.ZeroGraph, *batch: Tensor) -> int:
    """The most bytes of tensors alive at once while a compiled step runs, state at rest and the batch included."""
    batch = tuple(tensor.clone() for tensor in batch)
    compiled = step._compiled().executor
    feeds = [feed for feed in compiled.feeds if isinstance(feed, Tensor) or callable(feed)]
    gc.collect()
    with Live([batch, [feed if isinstance(feed, Tensor) else feed() for feed in feeds]]) as live:
        step(*batch)
    return live.most


def most_allocated_bytes(step: zg.ZeroGraph, *batch: Tensor) -> int:
    """The most bytes that torch's CPU allocator gives out within a step, beside those given out when it begins."""
    # The profiler hears of a block's end only if it saw the beginning.
    return most_allocated(lambda: step(*batch), before=lambda: step(*batch))


def most_allocated(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> int:
    """The most bytes that torch's CPU allocator gives out within ``run``, beside those given out when it begins.

    ``before`` is called first: of what was given out earlier nobody notices that it comes back.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        before()
        with record_function("measured"):
            run()
    events = list(seen.profiler.kineto_results.events())
    measured = next(event for event in events if event.name() == "measured")
    now = most = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        if measured.start_ns() <= event.start_ns() <= measured.end_ns():
            now += event.nbytes()
            most = max(most, now)
    return most
