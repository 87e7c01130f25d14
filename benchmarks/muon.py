"""Muon's updates spread over owners: how even the work is, and what batching equal shapes saves; results/muon.md.

python benchmarks/muon.py        # about a minute

ZeRO gives each matrix to one rank, which updates it. The first table has the owners that a prepared step has assigned:
the largest share of elements (memory and bytes), and of floating-point operations of Newton-Schulz, that a rank has,
over the mean. The second one is measured, one thread of the CPU, in turn, medians of 5 rounds: Muon's step for all
matrices of GPT small, for those of the busiest of N ranks, and Newton-Schulz alone, matrix by matrix as torch does it
and as one batch for each shape.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

import zerograph as zg  # noqa: E402
from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "muon.md"
Shape = tuple[int, int]


def gpt(layers: int, width: int) -> list[Shape]:
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


# Queries, keys and values with few heads, output; gate, up, down.
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
MODELS = {"GPT small": gpt(4, 256), "GPT mid": gpt(8, 512), "Llama-3-8B": LLAMA * 32}
RANKS, ROUNDS, ITERATIONS = (2, 4, 8, 64), 5, 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)


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


def newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalise matrices [batch, small, large], with torch's operations."""
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def batches(shapes: Sequence[Shape]) -> list[Tensor]:
    counts: dict[Shape, int] = defaultdict(int)
    for shape in shapes:
        counts[min(shape), max(shape)] += 1
    return [torch.randn(count, *shape) for shape, count in counts.items()]


@torch.no_grad()
def times() -> list[str]:
    shapes = MODELS["GPT small"]
    busiest = {ranks: max(owned(shapes, ranks), key=lambda one: sum(map(operations, one))) for ranks in (2, 4)}
    stacks = batches(shapes)
    runs = [step_of(shapes).step, *(step_of(one).step for one in busiest.values())]
    runs.append(lambda: [newton_schulz(matrix[None]) for stack in stacks for matrix in stack])
    runs.append(lambda: [newton_schulz(stack) for stack in stacks])
    whole, *parts, separate, batched = medians(runs, ROUNDS, warm_up=1)
    rows = [["Muon's step, all matrices", f"{whole * 1e3:.0f}", ""]]
    for ranks, seconds in zip(busiest, parts, strict=True):
        rows.append(
            [f"busiest of {ranks} ranks", f"{seconds * 1e3:.0f}", f"{seconds * ranks / whole:.2f} of 1 / {ranks}"]
        )
    rows.append(["Newton-Schulz, matrix by matrix", f"{separate * 1e3:.0f}", ""])
    rows.append(
        ["Newton-Schulz, a batch for each shape", f"{batched * 1e3:.0f}", f"{batched / separate:.2f} of the above"]
    )
    return [line(row) for row in rows]


def main() -> None:
    torch.set_num_threads(1)
    lines = [line(["model", "ranks", "elements, max / mean", "work, max / mean", "least possible"])]
    lines.append(line(["---", *["---:"] * 4]))
    lines += [line(balance(name, ranks)) for name in MODELS for ranks in RANKS]
    print("\n".join(lines), flush=True)
    timed = [line(["", "ms", "ratio"]), line(["---", "---:", "---:"]), *times()]
    print("\n".join(timed))
    command = f"`python benchmarks/muon.py`, torch {torch.__version__}"
    RESULTS.write_text(page("Muon over its owners", command, __doc__, *lines, "", *timed))


if __name__ == "__main__":
    main()
