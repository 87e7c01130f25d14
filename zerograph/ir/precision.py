"""Mixed precision: which parameters the step computes with in a low dtype.

``build()`` is traced inside ``torch.autocast``, so that every operator computes in the dtype that autocast's lists give
it, and the casts stand in the graph. A parameter that is read through casts only needs no fp32 outside its shard: what
rests is cast there, and its *compute copy*, in the low dtype, is what is gathered. A table of which rows are picked
is one as well, although autocast leaves it alone: the rows are widened behind the lookup, so that what is added to them
is added in fp32. Parameters that an operator reads in fp32 (the scale of a norm) stay fp32: they are few.
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
    """Names of the parameters that a captured step computes with as copies in ``dtype``; none where that is None."""
    if dtype is None:
        return frozenset()
    edits = edited_gradients(graph)
    found = set()
    for node in placeholders(graph, "parameter"):
        name = meta(node)["role"].name
        # An edit that is made on the flat bucket reads the master shard there.
        on_bucket = name in edits and edits[name].on_bucket
        if node.meta["val"].dtype is torch.float32 and _is_copied(node, dtype, on_bucket=on_bucket):
            found.add(name)
    return frozenset(found)


def _is_copied(node: fx.Node, dtype: torch.dtype, *, on_bucket: bool) -> bool:
    """Whether all that reads the parameter, or this view of it, would do with its copy, and something does."""
    readers = [user for user in node.users if not (on_bucket and is_edit(user))]
    return bool(readers) and all(
        is_cast(user, dtype)
        or looks_up_rows(user, node)
        or (is_view(user) and _is_copied(user, dtype, on_bucket=on_bucket))
        for user in readers
    )


def precision_text(low: torch.dtype | None, dtypes: Iterable[torch.dtype]) -> str:
    """Name what a step computes in, for people: ``"fp32"``, ``"bf16 with fp32 masters"``.

    Args:
        low: the dtype of mixed precision, or None.
        dtypes: those of the parameters as they rest.
    """
    names = [_NAMES.get(one, str(one).removeprefix("torch.")) for one in dict.fromkeys(dtypes)] or ["fp32"]
    if low is None:
        return " and ".join(names)
    return f"{_NAMES[low]} with {' and '.join(names)} masters"


_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether the node does nothing but change to ``dtype``."""
    if node.target is not aten._to_copy.default or node.kwargs.get("memory_format") not in _ANY_LAYOUT:
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(result.dtype is dtype and result.device == source.device)


_ANY_LAYOUT = (None, torch.preserve_format)


def looks_up_rows(node: fx.Node, table: fx.Node) -> bool:
    """Whether the node looks rows up in ``table``: whatever these are cast to can be cast before as well."""
    return node.target is aten.embedding.default and node.args[0] is table
