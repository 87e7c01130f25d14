"""Measure what ranks that split the sequence save, send and take: written to benchmarks/results/sequences.md.

python benchmarks/sequences.py                 # minutes; times need a quiet machine
python benchmarks/sequences.py --quick         # a small model and few rounds, shown but not written
python benchmarks/sequences.py --no-times      # without the times

A GPT and one sequence, fp32, AdamW, ZeRO off, backend eager, one thread per rank; two ranks over gloo split the
sequence. Activations: bytes that a step holds at its peak beyond those between steps, the batch left out, as
`step.inspect.memory` predicts them and as the live tensors of running steps show; gradients of a bucket are among them.
Longest sequence: the longest one for which a step keeps `memory_budget`, a multiple of 128, found by preparing steps.
Bytes sent: by each rank, to exchange activations. Step: medians of rounds in which the ways alternate. By hand:
plain PyTorch, with the all-to-alls of Ulysses written into the model (`all_to_all_single_autograd`, queries, keys and
values in one) inside `DistributedDataParallel`. DeepSpeed: the same model with its `DistributedAttention`, where
deepspeed is installed. torch's context parallel is not among the ways. Its first attention on a CPU ends in
"NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding
strategy registered."
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.contenders.tasks import Task, gpt  # noqa: E402
from benchmarks.contenders.training import adamw, loop  # noqa: E402
from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from benchmarks.task_steps import eager_step  # noqa: E402
from tests.peak_memory import most_alive_bytes  # noqa: E402
from tests.pool import Pool  # noqa: E402
from zerograph.inspection.step import Prepared  # noqa: E402
from zerograph.ir import mesh as meshes  # noqa: E402

FORMS = ("ulysses", "gather", "ring")
# Lengths that are tried are multiples of this.
UNIT = 128
RANKS = 2


def split(form: str) -> dict[str, Any]:
    return {"input_sbp": (zg.sbp.split(1),), "context_parallel_method": form}


# Name, number of ranks and options of what is compared.
WAYS = (("one device", 1, {}), *((form, RANKS, split(form)) for form in FORMS))


def piece(batch: tuple[Tensor, ...], rank: int, ranks: int) -> list[Tensor]:
    return [tensor.chunk(ranks, 1)[rank] for tensor in batch]


def prepared(task: Task, ranks: int, **options: Any) -> Prepared:
    """Return what rank 0 would run; no process group is needed."""
    batch = piece(task.batches(0)[0], 0, ranks)
    return eager_step(task, **options).prepare(meshes.line(ranks, 0, "sequence"), *batch)


def activations(step: Prepared) -> int:
    memory = step.memory
    return memory.peak - memory.at_rest - memory.kinds.get("inputs", 0)


def live_activations(sizes: dict[str, int], options: dict[str, Any]) -> int:
    """Return the bytes of activations that the live tensors of a running step of this rank show."""
    task = gpt(**sizes)
    step = eager_step(task, **options)
    first, second, third, *_ = (piece(batch, zg.rank(), zg.world_size()) for batch in task.batches(0))
    # The first update may be another program than the later ones.
    step(*first)
    step(*second)
    memory = step.inspect.memory
    return most_alive_bytes(step, *third) - memory.at_rest - memory.kinds.get("inputs", 0)


def exchanged(step: Prepared) -> tuple[str, int]:
    """Return the collectives that exchange activations, and the bytes that this rank sends in them."""
    # Losses and counts are some bytes; what the loss gathers are labels.
    moving = [one for one in step.collectives() if one.tensor_bytes > 64 and "gradient of" not in one.what]
    counts = Counter(f"{one.kind}, {one.phase}" for one in moving)
    return "; ".join(f"{count} {name}" for name, count in counts.items()), sum(one.bytes for one in moving)


def with_length(sizes: dict[str, int], length: int) -> Task:
    """Return the task with other batches: the model, with its table of positions, is the same for all lengths."""
    return replace(gpt(**sizes), draw=gpt(**(sizes | {"context": length})).draw)


def longest(sizes: dict[str, int], budget: int, ranks: int, **options: Any) -> int:
    """Return the longest sequence for which a step keeps the budget, in multiples of ``UNIT``."""

    def fits(length: int) -> bool:
        try:
            prepared(with_length(sizes, length), ranks, memory_budget=budget, **options)
        except zg.MemoryBudgetError:
            return False
        return True

    least, most = 0, 8 * UNIT
    while fits(most):
        least, most = most, 2 * most
    while most - least > UNIT:
        middle = (least + most) // (2 * UNIT) * UNIT
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


# From queries, keys and values [batch, positions, 3, heads, channels] to results [batch, positions, heads, channels].
Attention = Callable[[Tensor], Tensor]


class ByHand(nn.Module):
    """The same GPT on one piece of the sequence: heads and positions change places before and after attention."""

    def __init__(self, model: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, tokens: Tensor) -> Tensor:
        model, first = self.model, zg.rank() * tokens.shape[1]
        x = model.tokens(tokens) + model.positions(torch.arange(first, first + tokens.shape[1]))
        for block in model.blocks:
            qkv = block.qkv(block.norm1(x)).unflatten(-1, (3, block.heads, -1))
            x = x + block.out(self.attention(qkv).flatten(2))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        return model.head(model.norm(x))


def all_to_all(x: Tensor, cut: int, join: int) -> Tensor:
    """Send each rank its part along ``cut``; concatenate the parts that arrive along ``join``."""
    parts = torch.stack(x.chunk(RANKS, cut))
    sizes = [1] * RANKS
    received = all_to_all_single_autograd(parts, sizes, sizes, dist.group.WORLD)
    return torch.cat(received.unbind(0), join)


def exchanged_by_hand(qkv: Tensor) -> Tensor:
    whole = all_to_all(qkv.permute(2, 0, 3, 1, 4), cut=2, join=3)
    attended = F.scaled_dot_product_attention(*whole.unbind(0), is_causal=True)
    return all_to_all(attended, cut=2, join=1).transpose(1, 2)


def exchanged_by_deepspeed() -> Attention:
    # Read at import: without it DeepSpeed looks for an accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    # An all-reduce for inference that no training step calls; to build it takes a minute and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)

    def attend(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

    layer = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda qkv: layer(*qkv.unbind(2), batch_dim_idx=0)


def by_hand(task: Task, attention: Attention) -> Callable[[Tensor, Tensor], Tensor]:
    model = nn.parallel.DistributedDataParallel(ByHand(task.model(), attention))
    optimizer = adamw(model.parameters(), task.lr)
    return loop(lambda x, y: task.loss(model, x, y), optimizer.step, optimizer.zero_grad)


def alternate(sizes: dict[str, int], rounds: int) -> tuple[list[str], list[float], list[float]]:
    """Return the ways, the median seconds of their steps, and their losses of the last step."""
    task = gpt(**sizes)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {form: eager_step(task, **split(form)) for form in FORMS}
    if importlib.util.find_spec("deepspeed"):
        ways["DeepSpeed"] = by_hand(task, exchanged_by_deepspeed())
    ways["by hand"] = by_hand(task, exchanged_by_hand)
    batches = [piece(batch, zg.rank(), RANKS) for batch in task.batches(0)]
    losses = dict.fromkeys(ways, torch.zeros(()))

    def runner(way: str) -> Callable[[], None]:
        turns = itertools.cycle(batches)

        def run() -> None:
            losses[way] = ways[way](*next(turns)).detach()
            dist.barrier()

        return run

    seconds = medians([runner(way) for way in ways], rounds, warm_up=2)
    for way in sorted(set(ways) - set(FORMS)):
        dist.all_reduce(losses[way], dist.ReduceOp.SUM)
        losses[way] /= RANKS
    return list(ways), seconds, [loss.item() for loss in losses.values()]


def mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def memory_table(pool: Pool, sizes: dict[str, int]) -> list[str]:
    rows, whole = [], (0, 0)
    for name, ranks, options in WAYS:
        step = prepared(gpt(**sizes), ranks, **options)
        counts = activations(step), pool.run(ranks, live_activations, sizes, options)[0]
        whole = counts if ranks == 1 else whole
        ratios = [f"{count / full:.3f}" for count, full in zip(counts, whole, strict=True)]
        kinds, sent = exchanged(step)
        rows.append([name, mib(counts[0]), ratios[0], mib(counts[1]), ratios[1], kinds or "none", f"{sent:,}"])
    return Table(
        ["", "activations, predicted", "ratio", "live", "ratio", "exchanges of activations", "bytes sent"], rows
    )


def longest_table(sizes: dict[str, int], budget: int) -> list[str]:
    rows, whole = [], 0
    for recompute in ("none", "auto"):
        for name, ranks, options in WAYS:
            tokens = longest(sizes, budget, ranks, activation_checkpointing=recompute, **options)
            whole = whole or tokens
            rows.append([name, recompute, f"{tokens:,}", f"{tokens / whole:.2f}"])
    return Table(["", "recompute", f"longest sequence in {mib(budget)}", "ratio"], rows)


def times_table(pool: Pool, sizes: dict[str, int], rounds: int) -> list[str]:
    ways, seconds, losses = pool.run(RANKS, alternate, sizes, rounds)[0]
    if "DeepSpeed" not in ways:
        print("DeepSpeed is left out: deepspeed is not installed")
    rows = [
        [way, f"{taken * 1e3:.0f} ms", f"{seconds[-1] / taken:.2f}", f"{loss:.6f}"]
        for way, taken, loss in zip(ways, seconds, losses, strict=True)
    ]
    return Table(["two ranks", "step", "times as fast as by hand", "loss of the last step"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds, nothing written")
    parser.add_argument("--no-times", action="store_true", help="leave the times out")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    layers, width, context = (2, 64, 512) if asked.quick else (4, 256, 2048)
    sizes = {"layers": layers, "width": width, "heads": 4, "vocabulary": 1024, "context": context, "batch": 1}
    longer = sizes | {"context": 5 * context}
    state = prepared(with_length(longer, UNIT), 1).memory.at_rest
    pool = Pool(size=RANKS)
    lines = [*memory_table(pool, sizes), ""]
    lines += longest_table(longer, state + activations(prepared(gpt(**sizes), 1)))
    lines += [] if asked.no_times else ["", *times_table(pool, sizes, 3 if asked.quick else 15)]
    pool.close()
    if not asked.quick:
        title = f"Long sequences: a GPT of {layers} layers, width {width}, one sequence of {context:,}"
        write(title, "`python benchmarks/sequences.py`", __doc__, *lines)


if __name__ == "__main__":
    main()
