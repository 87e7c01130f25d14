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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

import zerograph as zg  # noqa: E402
from benchmarks.tables import page  # noqa: E402
from zerograph.compiler.artifacts import read_artifact  # noqa: E402
from zerograph.ir.mesh import line  # noqa: E402

RANKS = 2
RESULTS = ROOT / "benchmarks" / "results" / "first_step.md"
WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 256, 4, 8192, 128, 4
PLAIN = {"fused": "torch.compile, fused AdamW", "compiled": "torch.compile, AdamW compiled"}
OURS = {str(stage): f"zerograph {f'stage {stage}' if stage else 'off'}" for stage in range(4)}


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TrainStep(zg.ZeroGraph):
    def __init__(self, model: nn.Module, stage: int, backend: str = "inductor") -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        self.config.enable_zero(stage > 0, stage=stage or 1)
        self.config.backend = backend

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(self.model, x, y)
        loss.backward()
        return loss


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def plain_step(model: nn.Module, fused: bool) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    compiled = torch.compile(model)
    update = optimizer.step if fused else torch.compile(optimizer.step)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(compiled, x, y)
        loss.backward()
        update()
        return loss.detach()

    return step


def rank_main(kind: str, layers: int, backend: str) -> None:
    """One process: prints its seconds, its CPU seconds, and the loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(layers)
    torch.optim.AdamW(model.parameters())
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    dist.barrier()
    began, before = time.perf_counter(), sum(os.times()[:4])
    step = plain_step(model, fused=kind == "fused") if kind in PLAIN else TrainStep(model, int(kind), backend)
    loss = float(step(x, y))
    print("measured", time.perf_counter() - began, sum(os.times()[:4]) - before, loss, flush=True)
    dist.barrier()


def launch(kind: str, layers: int, backend: str, cache: Path) -> tuple[float, float, float]:
    """(seconds of the slower process, CPU seconds of both, loss)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "ZEROGRAPH_CACHE": str(cache / "zerograph"),
        "ZEROGRAPH_CACHE_STEPS": "4GiB",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--rank-of", kind, "--layers", str(layers), "--backend", backend]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    told = [process.communicate()[0] for process in ranks]
    lines = [line.split() for text in told for line in text.splitlines() if line.startswith("measured")]
    if len(lines) < RANKS:
        raise SystemExit(f"a process of {kind} with {layers} layers failed")
    seconds, cpu, losses = ([float(line[at]) for line in lines] for at in (1, 2, 3))
    return max(seconds), sum(cpu), sum(losses) / RANKS


def measure(kinds: dict[str, str], layers: int, backend: str, console: Console) -> list[str]:
    rows = []
    for kind, name in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            cold = launch(kind, layers, backend, Path(folder))
            warm = launch(kind, layers, backend, Path(folder))
        with_what = "torch.compile" if kind in PLAIN else backend
        times = f"{cold[0]:.1f} | {warm[0]:.2f} | {cold[1]:.1f} | {warm[1]:.1f}"
        rows.append(f"| {layers} | {name} | {with_what} | {times} | {cold[2]:.5f} |")
        console.print(rows[-1])
    return rows


class LlamaStep(zg.ZeroGraph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        self.set_zero_mode("distributed_split", stage=3)

    def build(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss


def llama_main(file: Path) -> None:
    """Prepare Llama-3-8B's step, from the file if there is one, and write the file else: prints seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(1, 2048, dtype=torch.int64)
    step, mesh = LlamaStep(model), line(64, 0, "ranks")
    began, before = time.perf_counter(), time.process_time()
    if is_second := file.exists():
        # load_compiled() needs parameters on a device: this is what it does, for a model that has none.
        members = replace(step._members(), meta=torch.device("cpu"))
        required = step._compiler.requirements(members, step._steps.dependencies(members).texts(), step._request)
        step._compiler.loaded.add(read_artifact(file, members), required)
    prepared = step.prepare(mesh, ids)
    print("measured", time.perf_counter() - began, time.process_time() - before)
    if not is_second:
        step.export_compiled(file, prepared)


def measure_llama(console: Console) -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--llama-file", str(Path(folder) / "step.zg")]
        for start in ("traced", "from a file"):
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            seconds, cpu = map(float, told.stdout.split()[-2:])
            rows.append(f"| {start} | {seconds:.2f} | {cpu:.2f} |")
            console.print(rows[-1])
    return rows


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
    rows, console = [], Console(width=160)
    for backend in [options.backend] if options.backend else ["eager", "inductor"]:
        kinds = {kind: (PLAIN | OURS)[kind] for kind in options.only or ["2", "3", "fused"]}
        if backend == "eager":
            kinds = {kind: name for kind, name in kinds.items() if kind not in PLAIN}
        rows += [row for count in layers for row in measure(kinds, count, backend, console)]
    if options.only or options.backend or options.layers:
        return
    table = ["| layers | step | backend | cold s | warm s | cold CPU s | warm CPU s | first loss |", "|---" * 8 + "|"]
    llama = ["| Llama-3-8B | s | CPU s |", "|---" * 3 + "|", *measure_llama(console)]
    title, command = "Seconds until the first step has run", "`python benchmarks/first_step.py`"
    RESULTS.write_text(page(title, command, __doc__, *table, *rows, "", *llama))


if __name__ == "__main__":
    main()
