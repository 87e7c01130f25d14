"""Train a small GPT on bytes of Python source with ZeRO, on any number of processes.

torchrun --nproc-per-node 2 examples/train_gpt.py              # ZeRO stage 2 on two processes: a few minutes on CPU
torchrun --nproc-per-node 2 examples/train_gpt.py --stage 3    # the same losses, and less memory per rank
python examples/train_gpt.py --steps 50 --corpus my_text.txt   # one process, any text
torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint runs/gpt    # resumes after a crash

With --checkpoint it resumes from the latest checkpoint, saves every --save-every steps, and saves and ends on SIGTERM.

Nothing is downloaded: by default the text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import zerograph as zg

WIDTH, LAYERS, HEADS, CONTEXT = 128, 4, 4, 128
# Larger than the usual 0.02, which is for wider models: with 0.02, attention starts flat here and learns late.
INIT_STD = 0.06
CORPUS_BYTES = 4_000_000
EVAL_BATCHES = 8
PROMPT, SAMPLE_BYTES = "def ", 600
# Folders of the standard library to leave out: not its own, tests, and tables of numbers.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


class Gpt(nn.Module):
    """A decoder-only transformer over bytes, with norms before each half of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds two such sums to the residual stream; scaled so that all of them have the size of one.
                summed = 2 * LAYERS if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(summed))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TrainStep(zg.ZeroGraph):
    """Forward, backward and AdamW's update as one graph."""

    def __init__(self, model: Gpt, lr: float, steps: int, stage: int) -> None:
        super().__init__()
        self.model = model
        decayed = {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1}
        others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decayed, others], lr=lr, betas=(0.9, 0.95))
        self.add_optimizer(optimizer, lr_scheduler=LambdaLR(optimizer, lambda step: warmup_cosine(step, steps)))
        if stage:
            self.set_zero_mode("distributed_split", stage=stage)

    def build(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(self.model, inputs, targets)
        loss.backward()
        return loss


class EvalStep(zg.ZeroGraph):
    """The loss alone. It reads the parameters as the training graph shards them, and needs no ZeRO settings."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.model = model

    def build(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_byte_loss(self.model, inputs, targets)


def next_byte_loss(model: Gpt, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def warmup_cosine(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a warm-up over the first 5 % of steps, then a cosine down to 5 %."""
    warmup = max(1, steps // 20)
    cosine = (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return (step + 1) / warmup if step < warmup else 0.05 + 0.95 * cosine


def read_corpus(path: Path | None) -> tuple[Tensor, Tensor]:
    """Return the training text and the held-out text: other files, or the end of the file if there is only one."""
    root = path or Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise SystemExit(f"--corpus {root}: no such file or folder")
    if root.is_file():
        files = [root.read_bytes()[:CORPUS_BYTES]]
    else:
        names = sorted(file.relative_to(root) for file in root.rglob("*" if path else "*.py") if file.is_file())
        names = [name for name in names if path or not SKIPPED & set(name.parts)]
        # Shuffled equally on all ranks, so that the cap and the held-out files are a random choice.
        random.Random(0).shuffle(names)
        sizes = itertools.accumulate((root / name).stat().st_size for name in names)
        files = [(root / name).read_bytes() for name, size in zip(names, sizes, strict=True) if size <= CORPUS_BYTES]
    if len(files) == 1:
        end = len(files[0]) - len(files[0]) // 20
        files = [files[0][:end], files[0][end:]]
    last = max(1, len(files) // 20)
    text, held_out = b"".join(files[:-last]), b"".join(files[-last:])
    if min(len(text), len(held_out)) <= CONTEXT:
        raise SystemExit(
            f"the corpus {root} is too small: {len(text):,} bytes to train on and {len(held_out):,} held out\n"
            f"Both must be longer than the context of {CONTEXT} bytes: give more text with --corpus."
        )
    return torch.tensor(list(text), dtype=torch.uint8), torch.tensor(list(held_out), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the batch of windows that begin at ``starts``: inputs, and the byte after each."""
    mine = starts.chunk(zg.world_size())[zg.rank()]
    windows = text[mine[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def bits_per_byte(evaluate: EvalStep, held_out: Tensor, batch: int) -> float:
    """Return the mean loss in bits, over windows spread evenly over the held-out text."""
    starts = torch.linspace(0, len(held_out) - CONTEXT - 1, EVAL_BATCHES * batch).long()
    losses = [float(evaluate(*windows(held_out, some))) for some in starts.split(batch)]
    return sum(losses) / len(losses) / math.log(2)


@torch.no_grad()
def sample(model: Gpt, generator: torch.Generator, device: torch.device, temperature: float = 0.8) -> str:
    written = list(PROMPT.encode())
    for _ in range(SAMPLE_BYTES):
        logits = model(torch.tensor([written[-CONTEXT:]], device=device))[0, -1].cpu()
        written.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    return bytes(written).decode(errors="replace")


@contextlib.contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows the step and its news: a bar on a terminal, elsewhere a line now and then."""
    if console.is_terminal and not console.quiet:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=steps)
            yield lambda step, news: bar.update(task, completed=step, description=news)
        return

    def line(step: int, news: str) -> None:
        if step % max(1, steps // 10) == 0 or step in (1, steps):
            console.print(f"step {step:>5}/{steps}  {news}")

    yield line


class Stop:
    """Stop all ranks after the same step when any of them gets SIGTERM."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, *_: object) -> None:
        self.requested = True

    def agreed(self, device: torch.device) -> bool:
        requests = torch.tensor(float(self.requested), device=device)
        dist.all_reduce(requests)
        return bool(requests)


def parse_options() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="updates to make")
    parser.add_argument("--batch", type=int, default=16, help="windows per step, over all processes together")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="of ZeRO; 0 is plain data parallel")
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters, the batches and the sample")
    parser.add_argument("--corpus", type=Path, help="a file or folder of text; None: Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/sample.txt"), help="where to write the text sample")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to, and to resume from if it has a checkpoint")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1 or options.batch % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error("--steps and --batch must be at least 1, and --batch must divide by the number of processes")
    return options


def main() -> None:
    options = parse_options()
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda" if enough_gpus and torch.cuda.is_available() else "cpu")
    text, held_out = (part.to(device) for part in read_corpus(options.corpus))
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)

    model = Gpt().to(device)
    train = TrainStep(model, options.lr, options.steps, options.stage)
    evaluate = EvalStep(model)

    # From here on every rank makes the same calls in the same order; only rank 0 prints.
    console = Console(quiet=zg.rank() != 0, highlight=False)
    console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes to train on, "
        f"{len(held_out):,} held out\n{zg.world_size()} x {device.type}, ZeRO stage {options.stage or 'off'}"
    )

    def batch() -> tuple[Tensor, Tensor]:
        return windows(text, torch.randint(len(text) - CONTEXT, (options.batch,), generator=generator))

    # The first call would compile too. Compiling here allows to time it; from here on the parameters are sharded.
    begun = time.perf_counter()
    inputs, targets = batch()
    train.compile(inputs, targets)
    compiling = time.perf_counter() - begun
    first = 0
    if options.checkpoint and (options.checkpoint / "latest").exists():
        train.load(options.checkpoint)
        first = train.steps_done
        console.print(f"resuming after step {first}")
        # Skip the batches that were trained on before.
        for _ in range(first):
            inputs, targets = batch()
    before = bits_per_byte(evaluate, held_out, options.batch)

    stop = Stop() if options.checkpoint else None
    speed = 0.0
    begun = time.perf_counter()
    with progress(console, options.steps) as tell:
        for step in range(first + 1, options.steps + 1):
            loss = float(train(inputs, targets))
            speed = (step - first) * options.batch * CONTEXT / (time.perf_counter() - begun)
            tell(step, f"loss {loss:.4f}  {speed:>7,.0f} tokens/s")
            inputs, targets = batch()
            if stop is not None and stop.agreed(device):
                train.save(options.checkpoint, keep=3)
                console.print(f"stopped by SIGTERM: saved after step {step}")
                return
            if options.checkpoint and (step % options.save_every == 0 or step == options.steps):
                train.save(options.checkpoint, asynchronous=True, keep=3)
        train.wait_for_save()
    after = bits_per_byte(evaluate, held_out, options.batch)

    with train.full_parameters():
        written = sample(model, generator, device)
    if zg.rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(written, encoding="utf-8")
    console.print(f"\nA sample, whole in {options.out}:", *written.splitlines()[:12], sep="\n", markup=False)

    # Plain data parallel keeps the parameters and AdamW's two moments whole on every rank.
    data_parallel = sum(3 * parameter.nbytes for parameter in model.parameters())
    table = Table(show_header=False)
    table.add_row("held-out bits per byte, before and after", f"{before:.3f} -> {after:.3f}")
    table.add_row("tokens per second", f"{speed:,.0f}")
    table.add_row("compiling the training step", f"{compiling:.1f} s")
    table.add_row("parameters and optimizer state per rank", f"{train.state_bytes():,} bytes")
    table.add_row("the same with plain data parallel", f"{data_parallel:,} bytes")
    table.add_row("sent by each rank per step", f"{sum(c.bytes for c in train.inspect.collectives()):,} bytes")
    console.print(table)


if __name__ == "__main__":
    main()
