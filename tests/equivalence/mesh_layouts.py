"""How ranks are arranged on a mesh, and which family is trained on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zerograph as zg
from zerograph.ir.sbp import Split

GRID = [[0, 1], [2, 3]]
COLUMNS, ROWS = (zg.sbp.broadcast, zg.sbp.split(0)), (zg.sbp.broadcast, zg.sbp.split(1))


@dataclass(frozen=True)
class Arrangement:
    """A mesh, how the batch lies on it, the SBP of the parameters whose names end so, and further options."""

    title: str
    input_sbp: tuple[zg.sbp.Sbp, ...]
    annotations: tuple[tuple[str, tuple[zg.sbp.Sbp, ...]], ...] = ()
    ranks: tuple[tuple[int, ...], ...] | tuple[int, ...] = ((0, 1), (2, 3))
    options: tuple[tuple[str, object], ...] = ()

    def place(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            for ending, sbp in self.annotations:
                if name.endswith(ending):
                    zg.annotate(parameter, sbp=sbp)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole batch."""
        grid = torch.tensor(self.ranks)
        position = (grid == zg.rank()).nonzero()[0].tolist()
        for sbp, ranks, index in zip(self.input_sbp, grid.shape, position, strict=True):
            if isinstance(sbp, Split) and sbp.dim < tensor.dim():
                tensor = tensor.chunk(ranks, sbp.dim)[index]
        return tensor


HYBRID = Arrangement("2x2, hybrid shards", (zg.sbp.split(0), zg.sbp.split(0)))

# Heads and channels of the inner layers between two ranks, beside ZeRO between the others.
TENSOR_PARALLEL = Arrangement(
    "2x2, tensor parallel",
    (zg.sbp.split(0), zg.sbp.broadcast),
    tuple((f"{name}_proj.weight", COLUMNS) for name in ("q", "k", "v", "gate", "up"))
    + tuple((f"{name}_proj.weight", ROWS) for name in ("o", "down")),
)

ON_A_MESH = {"bert": HYBRID, "resnet": HYBRID, "llama": TENSOR_PARALLEL}

# The sequence between two ranks, alone and beside data parallelism.
SEQUENCE = Arrangement("1x2, sequences", (zg.sbp.split(1),), ranks=(0, 1))
SEQUENCE_OF_FOUR = Arrangement("1x4, sequences", (zg.sbp.split(1),), ranks=(0, 1, 2, 3))
ROWS_AND_SEQUENCE = Arrangement("2x2, rows and sequences", (zg.sbp.split(0), zg.sbp.split(1)))
