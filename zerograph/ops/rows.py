"""Operators on tensors whose rows are spread over ranks, maybe unequally."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zerograph.ops.definition import define


def _shift_offsets(offsets: Tensor, bags: Sequence[int], indices: Sequence[int]) -> Tensor:
    """Make offsets count from the first index of all parts, where those of a later part begin at 0."""
    shifted, first, before = offsets.clone(), 0, 0
    for count, part in zip(bags, indices, strict=True):
        own = shifted[first : first + count]
        # Decided on the device. The sum reads the first offset before it is changed.
        own += (own[:1] == 0) * before
        first, before = first + count, before + part
    return shifted


# Start to gather along dimension 0; ``_c10d_functional.wait_tensor`` waits for it. ``rows[r]`` is rank r's x.shape[0],
# and ``total`` their sum.
gather_rows = define(
    "gather_rows",
    "(Tensor x, SymInt[] rows, SymInt total, str group_name) -> Tensor",
    None,
    lambda x, rows, total, group_name: x.new_empty((total, *x.shape[1:])),
)
# Start an all-to-all of unequal pieces; ``wait_tensor`` waits for it. ``x`` is flat: ``sent[r]`` elements go to rank r.
# The result has the size ``shape``. ``received[r]`` of its rows come from rank r.
exchange_rows = define(
    "exchange_rows",
    "(Tensor x, SymInt[] sent, SymInt[] received, SymInt[] shape, str group_name) -> Tensor",
    None,
    lambda x, sent, received, shape, group_name: x.new_empty(shape),
)
# Start to send a contiguous tensor to the next rank and to receive one of its shape from the rank before.
shift_rows = define(
    "shift_rows",
    "(Tensor x, int ranks, str group_name) -> Tensor",
    None,
    lambda x, ranks, group_name: x.new_empty(x.shape),
)
# The offsets of bags in a concatenation of parts; rank r has ``bags[r]`` offsets and ``indices[r]`` indices.
shift_offsets = define(
    "shift_offsets",
    "(Tensor offsets, SymInt[] bags, SymInt[] indices) -> Tensor",
    _shift_offsets,
    lambda offsets, bags, indices: offsets.clone(),
)
