"""One bucket's update on the CPU, as Inductor compiles it, beside torch's fused kernel; written to results/update.md.

python benchmarks/update.py        # less than a minute

The update is what zerograph traced from the optimizer's own step() without `fused=True`, on one flat tensor of fp32 in
memory, compiled as the backend "inductor" compiles it for a bucket; torch's is the same optimizer with `fused=True` on
the same tensor. One thread, in turn, medians of 25 rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import line, page  # noqa: E402
from zerograph.optim import trace_update  # noqa: E402
from zerograph.runtime.backends.inductor import compile_pieces  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "update.md"
HEADER = ["optimizer", "elements", "fused kernel, ms", "compiled update, ms", "ratio"]
ROUNDS = 25


def compiled(kind: type[torch.optim.Optimizer], numel: int, **options: Any) -> Callable[[], Any]:
    parameter = nn.Parameter(torch.randn(numel))
    optimizer = kind([parameter], **options)
    traced = trace_update(optimizer, optimizer.param_groups[0], parameter.shape, parameter.dtype, parameter.device)
    inputs = []
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            make = torch.rand if value.dim() else torch.ones
            inputs.append(make(value.shape, dtype=value.dtype))
    update = compile_pieces(traced.graph)
    return lambda: update(*inputs)


def fused(kind: type[torch.optim.Optimizer], numel: int, **options: Any) -> Callable[[], Any]:
    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.rand(numel)
    return kind([parameter], fused=True, **options).step


def row(name: str, kind: type[torch.optim.Optimizer], numel: int, **options: Any) -> list[str]:
    theirs, ours = medians([fused(kind, numel, **options), compiled(kind, numel, **options)], ROUNDS, warm_up=3)
    return [name, f"{numel:,}", f"{theirs * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{ours / theirs:.2f}"]


def main() -> None:
    torch.set_num_threads(1)
    lines = [line(HEADER), line(["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    for numel in (2**18, 2**20, 2**23):
        for name, kind, options in (
            ("AdamW", torch.optim.AdamW, {}),
            ("Adam", torch.optim.Adam, {}),
            ("SGD with momentum", torch.optim.SGD, {"momentum": 0.9, "lr": 1e-3}),
        ):
            lines.append(line(row(name, kind, numel, **options)))
            print(lines[-1], flush=True)
    command = f"`python benchmarks/update.py`, torch {torch.__version__}"
    RESULTS.write_text(page("A bucket's update on the CPU", command, __doc__, *lines))


if __name__ == "__main__":
    main()
