"""Muon's updates spread over owners: how even the work is, and what stacking equal shapes would save; results/muon.md.

python benchmarks/muon.py        # some minutes

ZeRO gives each matrix to one rank, which updates it. The first table has the owners that a prepared step has assigned:
the largest share of elements (memory and bytes), and of floating-point operations of Newton-Schulz, that a rank has,
over the mean. All times are CPU time of one thread, in turn, medians of 5 rounds. The second table has Muon's step for
all matrices of GPT small, and for those of the busiest of N ranks. The third one has Newton-Schulz of matrices of one
shape: one by one with torch's own function, and stacked, with a batched operator for each plain one; the time includes
torch.stack. Zerograph updates matrices one by one, as torch does. Stacking saves the overhead of operators on small
matrices and nothing on large ones. The height of a stack depends on the number of ranks, and bits may depend on it: the
last line counts stacks of random shapes, with sides up to 140, whose bits differ from those of one by one.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

import zerograph as zg  # noqa: E402
from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402

Shape = tuple[int, int]


def gpt(layers: int, width: int) -> list[Shape]:
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


# Queries, keys and values with few heads, output; gate, up, down.
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
MODELS = {"GPT small": gpt(4, 256), "GPT mid": gpt(8, 512), "Llama-3-8B": LLAMA * 32}
RANKS, ROUNDS, ITERATIONS = (2, 4, 8, 64), 5, 5
COEFFICIENTS, EPSILON = (3.4445, -4.775, 2.0315), 1e-7  # Muon's defaults
SHAPES = [(32, 32), (64, 64), (64, 256), (100, 60), (128, 128), (128, 512), (256, 256), (256, 1024), (1024, 256)]
SHAPES += [(512, 512), (512, 2048), (1024, 1024)]
COUNTS, RANDOM_STACKS = (2, 8), 250


class Matrices(zg.ZeroGraph):
    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = nn.ParameterList(torch.empty(shape) for shape in shapes)
        self.add_optimizer(torch.optim.Muon(self.model.parameters()))
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, x: Tensor) -> Tensor:
        loss = x.mean() * torch.stack([weight.sum() for weight in self.model]).sum()
        loss.backward()
        return loss


def operations(shape: Shape) -> int:
    """Floating-point operations of Newton-Schulz: three products in each iteration."""
    small, large = sorted(shape)
    return ITERATIONS * (4 * small * small * large + 2 * small**3)


def owned(shapes: Sequence[Shape], ranks: int) -> list[list[Shape]]:
    """By rank, the shapes of the matrices that it updates."""
    mesh = zg.mesh.Mesh((ranks,), (0,), ("ranks",))
    prepared = Matrices(shapes).prepare(mesh, torch.ones(1, device="meta"), device="meta")
    members: list[list[Shape]] = [[] for _ in range(ranks)]
    for bucket in prepared.context.buckets:
        assert bucket.owners is not None
        for slot, owner in zip(bucket.slots, bucket.owners, strict=True):
            rows, columns = slot.shape
            members[owner].append((rows, columns))
    return members


def balance(name: str, ranks: int) -> list[str]:
    work = owned(MODELS[name], ranks)
    shares = []
    for weight in (lambda shape: shape[0] * shape[1], operations):
        loads = [sum(map(weight, shapes)) for shapes in work]
        shares.append(f"{max(loads) * ranks / sum(loads):.3f}")
    least = max(max(map(operations, MODELS[name])) * ranks / sum(map(operations, MODELS[name])), 1.0)
    return [name, str(ranks), *shares, f"{least:.3f}"]


def step_of(shapes: Sequence[Shape]) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    return torch.optim.Muon(parameters)


def one_by_one(matrices: Sequence[Tensor]) -> list[Tensor]:
    return [newton_schulz(matrix, COEFFICIENTS, ITERATIONS, EPSILON) for matrix in matrices]


def stacked(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return what :func:`one_by_one` returns, for matrices of one shape, by a batched operator for each of torch's."""
    a, b, c = COEFFICIENTS
    x = torch.stack(list(matrices)).bfloat16()
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    x.div_(x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON))
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return list((x.mT if tall else x).unbind())


def equal_bits(matrices: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, one_by_one(matrices), stacked(matrices)))


def randoms(count: int, shape: Shape) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(count)]


def step_rows() -> list[list[str]]:
    shapes = MODELS["GPT small"]
    busiest = {ranks: max(owned(shapes, ranks), key=lambda one: sum(map(operations, one))) for ranks in (2, 4)}
    runs = [step_of(shapes).step, *(step_of(one).step for one in busiest.values())]
    whole, *parts = medians(runs, ROUNDS, warm_up=1, clock=time.thread_time)
    rows = [["Muon's step, all matrices", f"{whole * 1e3:.0f}", ""]]
    for ranks, seconds in zip(busiest, parts, strict=True):
        ratio = f"{seconds * ranks / whole:.2f} of 1 / {ranks}"
        rows.append([f"busiest of {ranks} ranks", f"{seconds * 1e3:.0f}", ratio])
    return rows


def stack_row(shape: Shape, count: int) -> list[str]:
    matrices = randoms(count, shape)
    repeats = max(1, int(2e8 / count / operations(shape)))

    def repeated(function: Callable[[Sequence[Tensor]], list[Tensor]]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeats):
                function(matrices)

        return run

    runs = [repeated(one_by_one), repeated(stacked)]
    plain, batched = (seconds / repeats for seconds in medians(runs, ROUNDS, warm_up=1, clock=time.thread_time))
    times = [f"{plain * 1e3:.2f}", f"{batched * 1e3:.2f}", f"{batched / plain:.2f}"]
    return ["x".join(map(str, shape)), str(count), *times, "yes" if equal_bits(matrices) else "no"]


def random_stacks_that_differ() -> int:
    """Count stacks of 2 to 6 matrices of random shapes whose bits differ from those one by one."""
    draw = random.Random(1)
    torch.manual_seed(0)
    stacks = [(draw.randint(2, 6), (draw.randint(1, 140), draw.randint(1, 140))) for _ in range(RANDOM_STACKS)]
    return sum(not equal_bits(randoms(*stack)) for stack in stacks)


def differing_stacks(**environment: str) -> int:
    """Return :func:`random_stacks_that_differ` of a new process."""
    command = [sys.executable, __file__, "--count-stacks"]
    run = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(run.stdout)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    if "--count-stacks" in sys.argv:
        print(random_stacks_that_differ())
        return
    lines: list[str] = []
    for header, rows in (
        (
            ["model", "ranks", "elements, max / mean", "work, max / mean", "least possible"],
            [balance(name, ranks) for name in MODELS for ranks in RANKS],
        ),
        (["", "ms", "ratio"], step_rows()),
        (
            ["shape", "matrices", "one by one, ms", "stacked, ms", "stacked / one by one", "equal bits"],
            [stack_row(shape, count) for shape in SHAPES for count in COUNTS],
        ),
    ):
        lines += [*Table(header, rows), ""]
    capability = torch.backends.cpu.get_cpu_capability()
    lines.append(
        f"Of {RANDOM_STACKS} stacks, bits differ in {differing_stacks()} with {capability}, "
        f"in {differing_stacks(ATEN_CPU_CAPABILITY='default')} with `ATEN_CPU_CAPABILITY=default`."
    )
    print(lines[-1])
    command = f"`python benchmarks/muon.py`, torch {torch.__version__}"
    write("Muon over its owners", command, __doc__, *lines)


if __name__ == "__main__":
    main()
