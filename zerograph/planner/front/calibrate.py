"""Measure a machine: rates of its device and of the exchange between its ranks.

All ranks measure at the same time, because on one machine they share memory, and perhaps cores. The result is that of
the median rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerograph.base.progress import tell
from zerograph.graph import ZeroGraph
from zerograph.planner import operators
from zerograph.planner.machine import Device, Link, Machine, Rate
from zerograph.planner.operators import Run
from zerograph.planner.plan import planned
from zerograph.runtime.job.process_group import Job, initialise, join, rank
from zerograph.runtime.wire import across_hosts, direct, selection

c10d = torch.ops._c10d_functional

_PRODUCT_SIZES = (64, 128, 256, 512, 1024)
# Operators of a step seldom read from a cache, and write to new memory: measurements cycle through this many bytes of
# arguments, and keep as many results, before they repeat the first.
_CYCLE = 2**26
_MOST_COPIES = 64
_BYTES = (2**14, 2**18, 2**21, 2**24, 2**26)
_SENT = (2**10, 2**16, 2**20, 2**23, 2**25)
_REPEATS = 7
# Parts of the measurement, in order.
_PARTS = ("products", *(f"{kind} operators" for kind in operators.OPERATORS), "overhead", "collectives", "a step")


def calibrate(name: str) -> Machine:
    """Measure the machine of this job. Every rank must call it; all get the same result.

    Args:
        name: name of the machine.

    Raises:
        CommunicationError: the ranks do not meet, or one of them is lost.
    """
    initialise()
    job = join(600.0)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    measure = _Measure(job, device)
    _say("products")
    products = {str(dtype).removeprefix("torch."): Rate(tuple(measure.products(dtype))) for dtype in _dtypes(device)}
    shares = {name: measure.share(make) for name, make in operators.PRODUCTS.items()}
    moved = {}
    for kind, make in operators.OPERATORS.items():
        _say(f"{kind} operators")
        moved[kind] = Rate(tuple(measure.moved(make)))
    _say("overhead")
    overhead = measure.overhead()
    _say("collectives")
    links = tuple(measure.links())
    overlap = measure.overlap() if job.size > 1 else 1.0
    described = Device(
        memory=_memory(device, job.size),
        products=products,
        moved=moved,
        shares=shares,
        overhead=overhead,
        host=measure.host(),
        fuses=device.type != "cpu",
        accelerator=device.type != "cpu",
        cpu=measure.cpu(),
        cpu_memory=None if device.type == "cpu" else _memory(torch.device("cpu"), job.size),
    )
    threads = f", {torch.get_num_threads()} thread(s) each" if device.type == "cpu" else ""
    hosts = 1 if (layout := direct.layout(job)) is None else len(set(layout.hosts))
    where = "one machine" if hosts == 1 else f"{hosts} hosts"
    source = f"measured on {job.size} rank(s) of {where}{threads}, torch {torch.__version__}"
    apart = Machine(name, described, links, overlap, source)
    _say("a step")
    whole = dataclasses.replace(apart, device=dataclasses.replace(described, in_step=measure.in_step(apart)))
    tell("measurements", len(_PARTS), len(_PARTS))
    return whole


def _say(doing: str) -> None:
    tell("measurements", _PARTS.index(doing), len(_PARTS), doing)


class _Measure:
    """Medians over repeats, and then over ranks."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device

    def products(self, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
        """Yield (operations, operations per second) of linear layers of growing size."""
        for size in _PRODUCT_SIZES:
            _, count, operations = operators.linear(size, dtype, self._device)
            make = functools.partial(operators.linear, size, dtype, self._device)
            yield operations, 3 * operations / self.seconds(self.cold(make, count))

    def share(self, make: operators.Product) -> float:
        """Return the share of the rate of equally large matrix products that these reach, forward and backward.

        Runs of both alternate: a machine's speed can change by more than their difference.
        """
        _, count, each = make(self._device)
        product = functools.partial(operators.linear, _PRODUCT_SIZES[-1], torch.float32, self._device)
        _, product_count, operations = product()
        runs = self.cold(functools.partial(make, self._device), count), self.cold(product, product_count)
        for run in runs:
            run()
        ratio = statistics.median(self._once(runs[1], 1) / self._once(runs[0], 1) for _ in range(_REPEATS))
        return self._agreed(ratio * sum(each) / (3 * operations))

    def moved(self, make: operators.Operator) -> Iterator[tuple[float, float]]:
        """Yield (bytes, bytes per second) of an operator on tensors of growing size."""
        for count in _BYTES:
            _, touched = make(count // 4, self._device)
            seconds = self.seconds(self.cold(functools.partial(make, count // 4, self._device), touched))
            yield float(touched), touched / seconds

    def cold(self, make: Callable[[], tuple[Run, Any, *tuple[Any, ...]]], count: int) -> Run:
        """Return a call that cycles through calls from ``make``, of ``count`` bytes each, and keeps their results."""
        copies = max(2, min(_MOST_COPIES, _CYCLE // count))
        runs = itertools.cycle([make()[0] for _ in range(copies)])
        results: deque[Any] = deque(maxlen=copies)
        return lambda: results.append(next(runs)())

    def overhead(self) -> float:
        """Return the dispatch overhead per operator in seconds, measured on a tiny tensor."""
        tiny = torch.ones(1, device=self._device)
        add = torch.ops.aten.add.Tensor

        def run() -> None:
            for _ in range(100):
                add(tiny, tiny)

        return self.seconds(run) / 100

    def links(self) -> Iterator[Link]:
        """Yield the levels of the network: two where each of several hosts has several ranks, else one."""
        if self._job.size == 1:
            yield Link(None, Rate(((1.0, 1e12),)), 0.0)
            return
        selection.select_exchanges(self._job)
        hosts = direct.spanning_group(self._job.groups[0])
        if hosts is None:
            yield self._link(None, self._start_gather)
            return
        inside = self._link(hosts.local.size, functools.partial(self._start_inside, hosts))
        # An exchange through memory is done by the rank that computes.
        yield dataclasses.replace(inside, overlap=0.0)
        yield self._link(None, functools.partial(self._start_between, hosts))

    def _link(self, ranks: int | None, starts: Callable[[int], Callable[[], Callable[[], Any]]]) -> Link:
        """Measure a level of the network.

        Args:
            starts: returns a function that starts an exchange in which each rank sends that many bytes, and returns the
                wait for it.
        """
        latency = self.seconds(_exchange(starts(_SENT[0])))
        points = []
        for count in _SENT[1:]:
            seconds = self.seconds(_exchange(starts(count))) - latency
            # A time close to the latency does not show the rate.
            if seconds > latency / 5 or count == _SENT[-1]:
                points.append((float(count), count / max(seconds, 1e-9)))
        return Link(ranks, Rate(tuple(points)), latency)

    def _start_inside(self, hosts: direct.SpanningGroup, sent: int) -> Callable[[], Callable[[], Any]]:
        """Start exchanges between the ranks of each host, through memory."""
        local = hosts.local
        others = local.size - 1
        own = torch.zeros(sent // others, dtype=torch.uint8)
        received = [torch.zeros_like(own) for _ in range(local.size)]
        return lambda: local.exchange([own] * len(received), received).wait

    def _start_between(self, hosts: direct.SpanningGroup, sent: int) -> Callable[[], Callable[[], Any]]:
        """Start exchanges between the ranks of equal position on all hosts."""
        others = hosts.other_hosts()
        own = torch.zeros(sent // len(others), dtype=torch.uint8)
        received = {host: torch.zeros_like(own) for host in others}

        def start() -> Callable[[], Any]:
            works = across_hosts.swap(hosts, dict.fromkeys(others, own), received)
            return lambda: [work.wait() for work in works]

        return start

    def overlap(self) -> float:
        """Return the share of a gather's time that computing hides: 1 is all, 0 is none.

        Between hosts of several ranks it is that of the exchange over the wire.
        """
        a, b = (torch.randn(512, 512, device=self._device) for _ in range(2))
        hosts = direct.spanning_group(self._job.groups[0])
        sent = _SENT[-1]
        start = self._start_gather(sent) if hosts is None else self._start_between(hosts, sent)
        exchange = _exchange(start)
        alone = self.seconds(exchange)
        times = max(1, round(alone / self.seconds(functools.partial(torch.mm, a, b))))

        def compute() -> None:
            for _ in range(times):
                torch.mm(a, b)

        def both() -> None:
            wait = start()
            compute()
            wait()

        shares = []
        for _ in range(_REPEATS):
            # Compared with its neighbours in time: a machine's speed drifts by more than the difference.
            apart = self._once(exchange, 1), self._once(compute, 1)
            shares.append((sum(apart) - self._once(both, 1)) / min(apart))
        return min(1.0, max(0.0, self._agreed(statistics.median(shares))))

    def in_step(self, apart: Machine) -> float:
        """Return the factor between the time of operators in a step and by themselves."""
        step, batch = started(self._device)
        predicted = planned(step, batch, [self._job.size], apart).time
        measured = self.seconds(lambda: step(*batch))
        return max(1.0, 1 + (measured - predicted.seconds) / predicted.compute)

    def host(self) -> float:
        """Return the bytes per second of a copy from the device to pinned memory."""
        if self._device.type == "cpu":
            return 1e12
        source = torch.empty(2**26, dtype=torch.uint8, device=self._device)
        target = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
        return 2**26 / self.seconds(lambda: target.copy_(source, non_blocking=True))

    def cpu(self) -> float:
        """Return the bytes per second that the CPU's update of a bucket reads, on all ranks at once."""
        parts = [[torch.ones(2**22)] for _ in range(4)]
        update, moved = torch.optim.AdamW([nn.Parameter(parts[0][0])], fused=True), 4 * 4 * 2**22
        update.param_groups[0]["params"][0].grad = parts[1][0]
        return moved / self.seconds(update.step)

    def _start_gather(self, sent: int) -> Callable[[], Callable[[], Any]]:
        """Start all-gathers over all ranks, as a step runs them."""
        part = torch.zeros(sent // max(self._job.size - 1, 1), dtype=torch.uint8, device=self._device)
        gather = selection.select_exchanges(self._job).get("all-gather", c10d.all_gather_into_tensor.default)
        (group,) = self._job.mesh.groups

        def start() -> Callable[[], Any]:
            whole = gather(part, self._job.size, group)
            return lambda: c10d.wait_tensor(whole)

        return start

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one call, on all ranks at once."""
        run()
        times = 1
        # All ranks decide alike: the call may be a collective.
        while self._agreed(self._once(run, times)) < 0.02 and times < 10_000:
            times *= 2
        return self._agreed(statistics.median(self._once(run, times) / times for _ in range(_REPEATS)))

    def _once(self, run: Callable[[], Any], times: int) -> float:
        self._synchronise()
        began = time.perf_counter()
        for _ in range(times):
            run()
        self._synchronise()
        return time.perf_counter() - began

    def _agreed(self, mine: float) -> float:
        """Return the median over ranks."""
        return float(self._job.channel.gather(torch.tensor(mine, dtype=torch.float64)).median())

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _exchange(start: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    return lambda: start()()


def _dtypes(device: torch.device) -> list[torch.dtype]:
    low = [torch.bfloat16, torch.float16] if device.type != "cpu" else [torch.bfloat16]
    return [torch.float64, torch.float32, *low]


def _memory(device: torch.device, ranks: int) -> int:
    """Return the memory of a GPU, or each rank's share of the CPU's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _CONTEXT, _BATCH = 2, 256, 4, 4096, 128, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        widened: Tensor = F.gelu(self.up(self.norm2(mixed)))
        following: Tensor = mixed + self.down(widened)
        return following


class Probe(ZeroGraph):
    """Two transformer layers with an embedding and a head, updated by AdamW."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(_VOCABULARY, _WIDTH),
            *(_Block() for _ in range(_LAYERS)),
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, _VOCABULARY, bias=False),
        ).to(device)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Compute the loss of the next tokens, and its gradients."""
        loss = F.cross_entropy(self.model(tokens).flatten(0, -2), following.flatten())
        loss.backward()
        return loss


def started(device: torch.device) -> tuple[Probe, tuple[Tensor, Tensor]]:
    """Return the step after two updates (the second may be another program), and a rank's batch."""
    step = Probe(device)
    # Generators of ranks may be equal; rows are not.
    tokens, following = (torch.randint(_VOCABULARY, (2, _BATCH, _CONTEXT), device=device) + rank()) % _VOCABULARY
    for _ in range(2):
        step(tokens, following)
    return step, (tokens, following)
