"""Labels of nodes in text: module path and the node's own name, which passes do not change.

``model.layers.0.up:addmm_2`` is the node ``addmm_2`` of the graph, from the module ``model.layers.0.up``. Inputs of the
graph have the name of their tensor: ``model.layers.0.up.weight``, ``bucket0``, ``bucket0.exp_avg``, ``input0``.
"""

from __future__ import annotations

from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Role, TensorRef, boxing_of, meta, origin, role
from zerograph.passes.placement.boxing import boxing


def labels(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the label of every node, in order."""
    return {node: label(node, bucket) for node, bucket in updated_buckets(graph).items()}


def updated_buckets(graph: fx.Graph) -> dict[fx.Node, str | None]:
    """Return the bucket that each node holds or updates, in order; nodes of an update have no module.

    None for other nodes, and for those of several buckets.
    """
    buckets: dict[fx.Node, str | None] = {}
    for node in graph.nodes:
        buckets[node] = _bucket(node, buckets)
    return buckets


def label(node: fx.Node, bucket: str | None = None) -> str:
    """Return the label of one node.

    Args:
        bucket: name of the bucket that the node updates.
    """
    graph_input = role(node)
    if graph_input is not None:
        return input_name(graph_input)
    if "parameter" in node.meta:
        return f"{meta(node)['parameter']}:{node.name}"
    if (name := short_tensor(tensor_moved(node.all_input_nodes[0] if is_wait(node) else node))) is not None:
        return f"{name}:{node.name}"
    where = origin(node)
    if where.phase == "update" and not where.module:
        return f"{f'{bucket}.' if bucket else ''}update:{node.name}"
    return f"{where.module or where.phase}:{node.name}"


def reference(node: fx.Node) -> str:
    """Return the text of a node as an argument: the name of a parameter, whether an input or a view of a bucket."""
    graph_input = role(node)
    if graph_input is not None:
        return input_name(graph_input)
    return str(meta(node).get("parameter", node.name))


def input_name(value: Role) -> str:
    """Return ``input0``, ``output0``, or the qualified name of a parameter or state."""
    return f"{value.kind}{value.name}" if value.kind in ("input", "output") else value.name


def is_wait(node: fx.Node) -> bool:
    """Return True if the node waits for a collective."""
    return node.target is WAIT


def kind(node: fx.Node) -> str:
    """Return ``"input"``, ``"output"``, ``"loop"``, ``"boxing"``, ``"wait"``, or ``"compute"``."""
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    if loop_of(node) is not None:
        return "loop"
    # Before ``box`` a node that changes an SBP has no Boxing yet.
    if boxing_of(node) is not None or node.target is boxing:
        return "boxing"
    return "wait" if is_wait(node) else "compute"


def tensor_moved(node: fx.Node) -> TensorRef | None:
    """Return the tensor that a boxing node moves; None for any other node, or if it is not determined yet."""
    moved = boxing_of(node)
    if moved is not None:
        return moved.tensor
    return meta(node).get("tensor") if node.target is boxing else None


def short_tensor(tensor: TensorRef | None) -> str | None:
    """Return ``bucket0`` or ``bucket0.grad``; None for a tensor without a name of one word."""
    if tensor is None or " " in tensor.name:
        return None
    return f"{tensor.name}.grad" if tensor.kind == "gradient" else tensor.name


def within(path: str, module: str) -> bool:
    """Return True if a qualified name is that of the module, or lies in it."""
    return path == module or path.startswith(f"{module}.")


def _bucket(node: fx.Node, buckets: dict[fx.Node, str | None]) -> str | None:
    graph_input = role(node)
    if graph_input is not None:
        return graph_input.bucket if graph_input.kind in ("bucket", "state") else None
    if "bucket" in node.meta:
        return str(meta(node)["bucket"])
    if origin(node).phase != "update":
        return None
    sources = {name for source in node.all_input_nodes if (name := buckets.get(source)) is not None}
    return sources.pop() if len(sources) == 1 else None
