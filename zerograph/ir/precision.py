"""Mixed precision: find the parameters that the step computes with in a low dtype.

``build()`` is traced inside ``torch.autocast``, so that operators compute in the dtypes of autocast's lists, and the
casts are nodes of the graph. A parameter that is read only through casts needs no fp32 outside its shard: the shard is
cast, and this *compute copy* in the low dtype is gathered. So is an embedding table, although autocast does not cast
it: the rows are cast to fp32 after the lookup, so that additions to them are in fp32. Parameters that an operator reads
in fp32 (the scale of a norm) stay fp32; they are few.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zerograph.ir.alias import is_view
from zerograph.ir.gradient_edits import edited_gradients, is_edit
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders

aten = torch.ops.aten

LOW_DTYPES = (torch.bfloat16, torch.float16)


def compute_copies(graph: fx.Graph, dtype: torch.dtype | None) -> frozenset[str]:
    """Return the names of the parameters that a captured step computes with as copies in ``dtype``.

    Args:
        graph: the captured graph.
        dtype: the low dtype; None for no mixed precision, and so no names.
    """
    if dtype is None:
        return frozenset()
    edits = edited_gradients(graph)
    names = set()
    for node in placeholders(graph, "parameter"):
        name = meta(node)["role"].name
        # An edit of the flat bucket reads the master shard.
        on_bucket = name in edits and edits[name].on_bucket
        if node.meta["val"].dtype is torch.float32 and _is_copied(node, dtype, on_bucket=on_bucket):
            names.add(name)
    return frozenset(names)


def _is_copied(node: fx.Node, dtype: torch.dtype, *, on_bucket: bool) -> bool:
    """Return True if the parameter or this view of it has readers, and all of them can read the compute copy."""
    readers = [user for user in node.users if not (on_bucket and is_edit(user))]
    return bool(readers) and all(
        is_cast(user, dtype)
        or looks_up_rows(user, node)
        or (is_view(user) and _is_copied(user, dtype, on_bucket=on_bucket))
        for user in readers
    )


def precision_text(low: torch.dtype | None, dtypes: Iterable[torch.dtype]) -> str:
    """Return a step's precision as text: ``"fp32"``, ``"bf16 with fp32 masters"``.

    Args:
        low: the dtype of mixed precision, or None.
        dtypes: dtypes of the stored parameters.
    """
    names = [_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dict.fromkeys(dtypes)] or ["fp32"]
    if low is None:
        return " and ".join(names)
    return f"{_NAMES[low]} with {' and '.join(names)} masters"


_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return True if the node only casts to ``dtype``."""
    if node.target is not aten._to_copy.default or node.kwargs.get("memory_format") not in _ANY_LAYOUT:
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(result.dtype is dtype and result.device == source.device)


_ANY_LAYOUT = (None, torch.preserve_format)


def looks_up_rows(node: fx.Node, table: fx.Node) -> bool:
    """Return True if the node looks up rows in ``table``: a cast of the rows can then be a cast of the table."""
    return node.target is aten.embedding.default and node.args[0] is table
