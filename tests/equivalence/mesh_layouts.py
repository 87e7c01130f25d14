"""How four ranks are arranged on a 2x2 mesh, and which family is trained on it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import zerograph as zg

GRID = [[0, 1], [2, 3]]
COLUMNS, ROWS = (zg.sbp.broadcast, zg.sbp.split(0)), (zg.sbp.broadcast, zg.sbp.split(1))


@dataclass(frozen=True)
class Arrangement:
    """A mesh, how the batch lies on it, and the SBP of the parameters whose names end so."""

    title: str
    batch_sbp: tuple[zg.sbp.Sbp, ...]
    annotations: tuple[tuple[str, tuple[zg.sbp.Sbp, ...]], ...] = ()

    def place(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            for ending, sbp in self.annotations:
                if name.endswith(ending):
                    zg.annotate(parameter, sbp=sbp)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole batch."""
        return tensor.chunk(4)[zg.rank()] if self == HYBRID else tensor.chunk(2)[zg.rank() // 2]


HYBRID = Arrangement("2x2, hybrid shards", (zg.sbp.split(0), zg.sbp.split(0)))

# Heads and channels of the inner layers between two ranks, beside ZeRO between the others.
TENSOR_PARALLEL = Arrangement(
    "2x2, tensor parallel",
    (zg.sbp.split(0), zg.sbp.broadcast),
    tuple((f"{name}_proj.weight", COLUMNS) for name in ("q", "k", "v", "gate", "up"))
    + tuple((f"{name}_proj.weight", ROWS) for name in ("o", "down")),
)

ON_A_MESH = {"bert": HYBRID, "resnet": HYBRID, "llama": TENSOR_PARALLEL}
