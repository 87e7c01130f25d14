"""What nodes are called in text: by module path, and by their own names, which passes leave alone.

``model.layers.0.up:addmm_2`` is the node ``addmm_2`` of the graph, made in the module ``model.layers.0.up``. Inputs of
the graph go by what they are: ``model.layers.0.up.weight``, ``bucket0``, ``bucket0.exp_avg``, ``input0``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import fx

from zerograph.ir.alias import WAIT
from zerograph.ir.metadata import Role, TensorRef, boxing_of, meta, origin, role
from zerograph.passes.placement.boxing import boxing


def labels(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the name of every node, in order."""
    found: dict[fx.Node, str] = {}
    # Nodes of an update have no module: the one bucket that they are about, as their inputs tell.
    about: dict[fx.Node, str | None] = {}
    for node in graph.nodes:
        about[node] = _bucket(node, about)
        found[node] = label(node, about[node])
    return found


def label(node: fx.Node, bucket: str | None = None) -> str:
    """The name of one node; ``bucket`` is the one that it updates."""
    given = role(node)
    if given is not None:
        return input_name(given)
    if "parameter" in node.meta:
        return f"{meta(node)['parameter']}:{node.name}"
    if (name := short_tensor(tensor_moved(node.all_input_nodes[0] if is_wait(node) else node))) is not None:
        return f"{name}:{node.name}"
    where = origin(node)
    if where.phase == "update" and not where.module:
        return f"{f'{bucket}.' if bucket else ''}update:{node.name}"
    return f"{where.module or where.phase}:{node.name}"


def reference(node: fx.Node) -> str:
    """How the arguments of another node name it: parameters as such, be they inputs or views of a bucket."""
    given = role(node)
    if given is not None:
        return input_name(given)
    return str(meta(node).get("parameter", node.name))


def input_name(given: Role) -> str:
    """``input0``, ``output0``, or the qualified name of what it is."""
    return f"{given.kind}{given.name}" if given.kind in ("input", "output") else given.name


def is_wait(node: fx.Node) -> bool:
    """Return True if the node waits for a collective."""
    return node.target is WAIT


def is_boxing(node: fx.Node) -> bool:
    """Whether the node changes an SBP, or stands for a change that ``box`` is yet to work out."""
    return boxing_of(node) is not None or node.target is boxing


def tensor_moved(node: fx.Node) -> TensorRef | None:
    """Return the tensor that a boxing node moves; None for any other node, or where it is not known yet."""
    known = boxing_of(node)
    if known is not None:
        return known.tensor
    return meta(node).get("tensor") if node.target is boxing else None


def short_tensor(tensor: TensorRef | None) -> str | None:
    """Return ``bucket0`` or ``bucket0.grad``; None for a tensor that has no name of one word."""
    if tensor is None or " " in tensor.name:
        return None
    return f"{tensor.name}.grad" if tensor.kind == "gradient" else tensor.name


def within(path: str, module: str) -> bool:
    """Return True if a qualified name is that of the module, or of something in it."""
    return path == module or path.startswith(f"{module}.")


def close_to(name: str, known: Iterable[str], most: int = 3) -> str:
    """``; did you mean 'a' or 'b'?``, or nothing where nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=most, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _bucket(node: fx.Node, about: dict[fx.Node, str | None]) -> str | None:
    given = role(node)
    if given is not None:
        return given.name.split(".")[0] if given.kind in ("bucket", "state") else None
    if "bucket" in node.meta:
        return str(meta(node)["bucket"])
    if origin(node).phase != "update":
        return None
    found = {name for source in node.all_input_nodes if (name := about.get(source)) is not None}
    return found.pop() if len(found) == 1 else None
