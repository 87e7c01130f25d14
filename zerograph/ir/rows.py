"""The gather of a tensor whose rows are spread unequally over ranks, as an operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

library = torch.library.Library("zerograph", "FRAGMENT")
library.define(
    "gather_rows(Tensor x, SymInt[] rows, SymInt total, str group_name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
# Start to gather along dimension 0; ``_c10d_functional.wait_tensor`` waits for it. ``rows[r]`` is rank r's x.shape[0],
# and ``total`` their sum.
gather_rows = torch.ops.zerograph.gather_rows.default


def _gather_rows_fake(x: Tensor, rows: Sequence[int], total: int, group_name: str) -> Tensor:
    return x.new_empty((total, *x.shape[1:]))


torch.library.register_fake("zerograph::gather_rows", _gather_rows_fake, lib=library)
