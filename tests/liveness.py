"""What is alive when: the emitted graph read as memory, node by node."""

from __future__ import annotations

import torch
from torch import fx

from zerograph.step_graph import role

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
