"""Families whose batch may have any number of rows: the table of docs/any-batch.md.

Their steps with symbolic rows send what the static ones send: no rule or pass loses a split for a symbol.
"""

from __future__ import annotations

from collections import Counter

import torch

import zerograph as zg
from tests.equivalence.families import FAMILIES
from tests.harness import LossStep, sliced
from zerograph.ir.mesh import line

# The others of the table are of these kinds, or are trained on ragged batches elsewhere.
NAMES = ("bert", "gru_time_first")
# Whisper: attention as in BERT, two lengths as in the transformer, convolutions as in the U-Net. LSTM: as the GRU.
REST = ("unet", "graph", "transformer", "mixer", "whisper", "lstm")


def sent(name: str, dynamic: bool) -> Counter[tuple[str, int]]:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.make()
    step = LossStep(model, torch.optim.AdamW(model.parameters()), 2, dynamic_shapes="auto")
    batch = [whole.chunk(2)[0] for whole in family.batch(torch.Generator().manual_seed(0), 8)]
    for tensor in batch if dynamic else ():
        zg.mark_dynamic(tensor, 0)
    prepared = step.prepare(line(2, 0, "ranks"), *batch)
    assert ("s0_rows" in prepared.text()) == dynamic
    return Counter((one.kind, one.bytes) for one in prepared.collectives())


@sliced("name", NAMES, REST)
def test_symbolic_rows_send_what_static_ones_do(name: str) -> None:
    assert sent(name, dynamic=True) == sent(name, dynamic=False)
