"""A bucket's gather, reduction and sum between two ranks of one host, three ways; written to results/wire.md.

python benchmarks/wire.py        # less than a minute

Two ranks, one thread each, fp32; milliseconds until a rank has what it needs, the addition of a reduction included.
torch: its functional collective over gloo. sockets: zerograph's exchange of pieces over gloo. memory: the same, read
out of the other's memory (process_vm_readv). In turn, medians of 25 rounds on rank 0; ratio: memory / the better of the
others. Over sockets a sum is torch's own.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

from benchmarks.tables import line, page  # noqa: E402
from tests.pool import Pool  # noqa: E402
from zerograph.runtime.job.process_group import join  # noqa: E402
from zerograph.runtime.wire import collectives, direct  # noqa: E402

c10d = torch.ops._c10d_functional

RESULTS = ROOT / "benchmarks" / "results" / "wire.md"
HEADER = ["", "MiB of the whole", "torch", "sockets", "memory", "ratio"]
KINDS = {"gather": (1, 4, 16, 32), "reduction": (1, 4, 16, 32), "sum": (1, 4, 16, 32)}
ROUNDS = 25


def groups() -> tuple[str, str]:
    """Names of a group whose ranks use sockets, and of one whose ranks read each other's memory."""
    with patch.dict(os.environ, {"ZEROGRAPH_WIRE": "sockets"}):
        far = join(300.0)
        assert direct.hosts(far).groups == (None,)
    near = join(301.0)
    assert direct.hosts(near).groups != (None,), "ranks of this machine cannot read each other's memory"
    return far.mesh.groups[0], near.mesh.groups[0]


def ways(kind: str, mib: int) -> list[Callable[[], Tensor]]:
    far, near = groups()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(mib * 2**18)
    if kind == "sum":
        return [
            lambda: c10d.wait_tensor(c10d.all_reduce_(whole, "sum", far)),
            lambda: c10d.wait_tensor(collectives.sum_ranks_(whole, ranks, near)),
        ]
    shard = whole.chunk(ranks)[rank].clone()

    def reduced(group: str) -> Tensor:
        received = c10d.wait_tensor(collectives.exchange_pieces(whole, ranks, group))
        return received[0].add_(shard)

    if kind == "gather":
        return [
            lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(shard, ranks, far)),
            lambda: c10d.wait_tensor(collectives.gather_pieces(shard, ranks, far)),
            lambda: c10d.wait_tensor(collectives.gather_pieces(shard, ranks, near)),
        ]
    return [
        lambda: c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, "sum", ranks, far)),
        lambda: reduced(far),
        lambda: reduced(near),
    ]


def measured(kind: str, mib: int) -> list[float]:
    """Median seconds of each way."""
    torch.set_num_threads(1)
    runs = ways(kind, mib)
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(-3, ROUNDS):
        for run, taken in zip(runs, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            run()
            if number >= 0:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


def main() -> None:
    lines = [line(HEADER), line(["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    pool = Pool(2)
    for kind, sizes in KINDS.items():
        for mib in sizes:
            *others, memory = pool.run(2, measured, kind, mib)[0]
            shown = [f"{seconds * 1e3:.2f}" for seconds in others]
            blank = [""] * (2 - len(others))
            cells = [kind, str(mib), *shown, *blank, f"{memory * 1e3:.2f}", f"{memory / min(others):.2f}"]
            lines.append(line(cells))
            print(lines[-1], flush=True)
    pool.close()
    command = f"`python benchmarks/wire.py`, torch {torch.__version__}"
    RESULTS.write_text(page("A bucket between two ranks of one host", command, __doc__, *lines))


if __name__ == "__main__":
    main()
