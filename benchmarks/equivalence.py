"""How far N ranks end from one device: a table of model x stage, written to benchmarks/results/equivalence.md.

python benchmarks/equivalence.py                    # every family, some minutes
python benchmarks/equivalence.py bert resnet        # these only, shown but not written

Each family (tests/equivalence) trains five steps of AdamW (eps 0.1) on two ranks at every stage (three of them on
four ranks too: hybrid shards, or tensor parallelism beside ZeRO), and in plain PyTorch in one process on the whole
batch. Told: the largest deviation among the losses and the final parameters and buffers, as length of the difference
over length of the value, all in fp32 (of which one bit is 1.2e-7).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests are no installed package

from benchmarks.tables import Table, asked_names, write  # noqa: E402
from tests.equivalence.families import FAMILIES  # noqa: E402
from tests.equivalence.mesh_layouts import ON_A_MESH  # noqa: E402
from tests.equivalence.training import STAGES, Result, Stage, equal, largest_deviation, train, train_plainly  # noqa: E402
from tests.pool import Pool  # noqa: E402

HEADER = ["model", "ranks", *(f"stage {one}" if one != "off" else "off" for one in STAGES), "stages bitwise equal"]


def on_all_ranks(name: str) -> dict[Stage, Result]:
    """Train one rank on its part of the batch; return its final state."""
    return train(FAMILIES[name])[0]


@dataclass(frozen=True)
class Setting:
    """Rows of the table: how the ranks are arranged, and what each of them runs for a family."""

    title: str
    ranks: int
    run: Callable[[str], dict[Stage, Result]]
    families: tuple[str, ...]


def on_a_mesh(name: str) -> dict[Stage, Result]:
    """The same of four ranks on a 2x2 mesh."""
    return train(FAMILIES[name], arrangement=ON_A_MESH[name])[0]


SETTINGS = (
    Setting("2", 2, on_all_ranks, tuple(FAMILIES)),
    *(Setting(how.title, 4, on_a_mesh, (name,)) for name, how in ON_A_MESH.items()),
)


def row(pool: Pool, setting: Setting, name: str) -> list[str]:
    results = pool.run(setting.ranks, setting.run, name)
    wanted = train_plainly(FAMILIES[name])
    deviations = [f"{largest_deviation(results[0][stage], wanted):.1e}" for stage in STAGES]
    same = all(equal(found[stage], results[0][STAGES[0]]) for found in results for stage in STAGES)
    return [name, setting.title, *deviations, "yes" if same else "NO"]


def main() -> None:
    asked = asked_names(__doc__, "families", FAMILIES)
    table = Table(HEADER)
    pool = Pool(size=max(setting.ranks for setting in SETTINGS), patience=900.0)
    for setting in SETTINGS:
        for name in setting.families:
            if not asked or name in asked:
                table.add(row(pool, setting, name))
    pool.close()
    if not asked:
        command = f"`python benchmarks/equivalence.py`, torch {torch.__version__}"
        write("Deviation from one device", command, __doc__, *table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
