"""Memory, traffic and the graph as TensorBoard shows them, where tensorboard is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zerograph.compiler.compiled import RewrittenStep
from zerograph.errors import ConfigError
from zerograph.inspection.nodes import NodeFacts, facts
from zerograph.inspection.summary import summary


def write(step: RewrittenStep, folder: str | os.PathLike[str], number: int) -> Path:
    """Write scalars and the emitted graph into one event file in ``folder``.

    One, since TensorBoard goes on reading only the last of a folder: beside a writer that is still open, its own.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import scalar
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard's files are written by the package tensorboard, which cannot be imported: {error}\n"
            "Install it: pip install tensorboard."
        ) from error
    writer = FileWriter(str(folder))
    try:
        for name, value in scalars(step).items():
            writer.add_summary(scalar(name, value), number)
        # Without the metadata of a run, which would be shown as a profile of nothing.
        writer.add_event(Event(graph_def=_graph(step).SerializeToString()), number)
    finally:
        writer.close()
    return Path(folder)


def scalars(step: RewrittenStep) -> dict[str, float]:
    """What is written, by tag: bytes of memory by kind, bytes sent and collectives by phase and kind, nodes."""
    found = summary(step)
    memory = {
        "zerograph/memory/peak": found.memory.peak,
        "zerograph/memory/at rest": found.memory.at_rest,
        **{f"zerograph/memory at the peak/{kind}": count for kind, count in found.memory.kinds.items()},
    }
    traffic = {f"zerograph/bytes sent/{one.phase} {one.kind}": one.bytes for one in found.sent}
    times = {f"zerograph/collectives/{one.phase} {one.kind}": one.times for one in found.sent}
    return {**memory, "zerograph/bytes sent/all": found.bytes_sent, **traffic, **times, "zerograph/nodes": found.nodes}


def tree_names(nodes: list[NodeFacts]) -> dict[str, str]:
    """Each node's place in TensorBoard's tree, by id: its module's path with slashes, then its name."""
    return {one.id: "/".join([*(one.module or one.phase or one.kind).split("."), one.id]) for one in nodes}


def _graph(step: RewrittenStep) -> Any:
    from tensorboard.compat.proto import attr_value_pb2, graph_pb2, node_def_pb2, versions_pb2

    nodes, edges = facts(step.emitted, step.context)
    names = tree_names(nodes)
    reads: dict[str, list[str]] = {}
    for edge in edges:
        reads.setdefault(edge.target, []).append(names[edge.source])
    made = [
        node_def_pb2.NodeDef(
            name=names[one.id],
            op=one.boxing or one.operator,
            input=reads.get(one.id, []),
            attr={
                name: attr_value_pb2.AttrValue(s=str(value).encode())
                for name, value in one.as_dict().items()
                if value not in ("", 0) and name not in ("label", "operator")
            },
        )
        for one in nodes
    ]
    return graph_pb2.GraphDef(node=made, versions=versions_pb2.VersionDef(producer=22))
