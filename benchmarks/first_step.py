"""Seconds until the first step has run, cold and at a second start, beside ``torch.compile``; and Llama-3-8B's step.

python benchmarks/first_step.py                           # a GPT of 12 layers, both backends, and Llama: ten minutes
python benchmarks/first_step.py --layers 4 --only 2       # stage 2 alone
python benchmarks/first_step.py --backend eager --only 3  # the eager backend, in a minute

Two processes start together, as ranks do. Cold: they find no compiled code and no cached step; warm: they find what a
first pair left.
Counted from after the imports, and the making of the model and of an optimizer, for which torch imports its compiler,
until the first step is done, in the slower process; CPU seconds are those of both together with all compilers that they
called. ``torch.compile`` has no collectives to
run: each process trains a model of its own.
Llama-3-8B is on the meta device, for rank 0 of 64 in stage 3: all until the backend, traced and from a file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.compile_time import llama  # noqa: E402
from benchmarks.contenders.tasks import Task, gpt  # noqa: E402
from benchmarks.contenders.training import loop  # noqa: E402
from benchmarks.contenders.zerograph import TrainStep  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from benchmarks.task_steps import run_ranks  # noqa: E402
from zerograph.compiler.artifacts import read_artifact  # noqa: E402
from zerograph.ir.mesh import line  # noqa: E402

RANKS = 2
HEADER = ["layers", "step", "backend", "cold s", "warm s", "cold CPU s", "warm CPU s", "first loss"]
WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 256, 4, 8192, 128, 4
PLAIN = {"fused": "torch.compile, fused AdamW", "compiled": "torch.compile, AdamW compiled"}
OURS = {str(stage): f"zerograph {f'stage {stage}' if stage else 'off'}" for stage in range(4)}


def plain_step(trained: Task, model: nn.Module, fused: bool) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    compiled: Any = torch.compile(model)
    update = optimizer.step if fused else torch.compile(optimizer.step)
    return loop(lambda x, y: trained.loss(compiled, x, y), update, optimizer.zero_grad)


def rank_main(kind: str, layers: int, backend: str) -> None:
    """One process: prints its seconds, its CPU seconds, and the loss."""
    torch.set_num_threads(1)
    trained = gpt(layers, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH)
    model = trained.model()
    torch.optim.AdamW(model.parameters())
    dist.init_process_group("gloo")
    x, y = trained.batches(0)[0]
    dist.barrier()
    began, before = time.perf_counter(), sum(os.times()[:4])
    step: Any = plain_step(trained, model, fused=kind == "fused") if kind in PLAIN else TrainStep(trained, model)
    if kind not in PLAIN:
        step.config.set(stage=int(kind))
        step.config.backend = backend
    loss = float(step(x, y))
    print("measured", time.perf_counter() - began, sum(os.times()[:4]) - before, loss, flush=True)
    dist.barrier()


def launch(kind: str, layers: int, backend: str, cache: Path) -> tuple[float, float, float]:
    """(seconds of the slower process, CPU seconds of both, loss)."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "ZEROGRAPH_CACHE": str(cache / "zerograph"),
        "ZEROGRAPH_CACHE_STEPS": "4GiB",
    }
    command = [sys.executable, __file__, "--rank-of", kind, "--layers", str(layers), "--backend", backend]
    told = run_ranks(command, RANKS, caches)
    lines = [line.split() for text in told for line in text.splitlines() if line.startswith("measured")]
    seconds, cpu, losses = ([float(line[at]) for line in lines] for at in (1, 2, 3))
    return max(seconds), sum(cpu), sum(losses) / RANKS


def measure(kinds: dict[str, str], layers: int, backend: str, table: Table) -> None:
    for kind, name in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            cold = launch(kind, layers, backend, Path(folder))
            warm = launch(kind, layers, backend, Path(folder))
        with_what = "torch.compile" if kind in PLAIN else backend
        times = [f"{cold[0]:.1f}", f"{warm[0]:.2f}", f"{cold[1]:.1f}", f"{warm[1]:.1f}"]
        table.add([str(layers), name, with_what, *times, f"{cold[2]:.5f}"])


def llama_main(file: Path) -> None:
    """Prepare Llama-3-8B's step, from the file if there is one, and write the file else: prints seconds."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        step, _ = llama(fused=True)
        ids = torch.zeros(1, 2048, dtype=torch.int64)
    mesh = line(64, 0, "ranks")
    began, before = time.perf_counter(), time.process_time()
    if is_second := file.exists():
        # load_compiled() needs parameters on a device: this is what it does, for a model that has none.
        members = replace(step._members(), meta=torch.device("cpu"))
        required = step._compiler.requirements(members, step._steps.dependencies(members).texts(), step._request)
        step._compiler.loaded.add(read_artifact(file, members), required)
    prepared = step.prepare(mesh, ids, ids)
    print("measured", time.perf_counter() - began, time.process_time() - before)
    if not is_second:
        step.export_compiled(file, prepared)


def measure_llama() -> Table:
    table = Table(["Llama-3-8B", "s", "CPU s"])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--llama-file", str(Path(folder) / "step.zg")]
        for start in ("traced", "from a file"):
            (told,) = run_ranks(command, 1)
            seconds, cpu = map(float, told.split()[-2:])
            table.add([start, f"{seconds:.2f}", f"{cpu:.2f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", help="of the GPT, alone: nothing is saved")
    parser.add_argument("--only", nargs="+", choices=[*PLAIN, *OURS], help="these alone: nothing is saved")
    parser.add_argument("--backend", choices=["inductor", "eager"], help="this one alone: nothing is saved")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--llama-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.llama_file:
        llama_main(options.llama_file)
        return
    layers = options.layers or [12]
    if options.rank_of:
        rank_main(options.rank_of, layers[0], options.backend)
        return
    table = Table(HEADER)
    for backend in [options.backend] if options.backend else ["eager", "inductor"]:
        kinds = {kind: (PLAIN | OURS)[kind] for kind in options.only or ["2", "3", "fused"]}
        if backend == "eager":
            kinds = {kind: name for kind, name in kinds.items() if kind not in PLAIN}
        for count in layers:
            measure(kinds, count, backend, table)
    if options.only or options.backend or options.layers:
        return
    title, command = "Seconds until the first step has run", "`python benchmarks/first_step.py`"
    write(title, command, __doc__, *table, "", *measure_llama())


if __name__ == "__main__":
    main()
