"""Tokens per second of ``step.generate()`` between steps; written to results/generate.md.

python benchmarks/generate.py        # some minutes; the second part needs root, ip and tc

A Llama of random weights in fp32, sharded over two ranks; one row of 16 tokens on each rank, greedy, transformers' own
loop. Ways run in turn, in the same processes. "Plain" is model.generate() on a whole model. "Gathered once" and "in
units" are step.generate() without and with a memory budget that does not hold the model. "Gathered for each token"
gathers all buckets before each forward and frees them after it, as a loop over step.full_parameters() does. "Gathers
alone" gathers and frees all buckets, without a forward. The time for a token includes that of the gathers; rank 0's
time, medians. On one host a gather is a copy through memory, by the two cores that also compute. Between two hosts
(network namespaces, joined by a veth pair that tc tbf shapes) it is what the wire takes. The last part generates in one
process: as a graph, the decode step with its static cache of keys and values runs without Python of the model, and
Inductor compiles it to kernels.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.modeling_outputs import CausalLMOutputWithPast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests and benchmarks are no installed packages

import zerograph as zg  # noqa: E402
from benchmarks.measure.hosts import two_hosts, unavailable  # noqa: E402
from benchmarks.measure.rounds import medians  # noqa: E402
from benchmarks.tables import Table, write  # noqa: E402
from benchmarks.task_steps import run_ranks  # noqa: E402
from tests.pool import Pool  # noqa: E402

HEADER = ["", "way", "ms per token", "gathered once is faster by"]
WAYS = ("plain", "gathered once", "in units", "gathered for each token", "gathers alone")
NEW = 32
# Of the wire between two hosts, as tc has it.
RATE = "1gbit"


def llama(hidden: int = 1024, layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        vocab_size=2048,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Forward(zg.ZeroGraph):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids).logits
        return logits


@contextlib.contextmanager
def gathered_for_each_forward(step: Forward) -> Any:
    """Enter ``full_parameters()`` before each forward of the model, and leave it afterwards."""
    stack = contextlib.ExitStack()
    hooks = [
        step.model.register_forward_pre_hook(lambda *_: stack.enter_context(step.full_parameters())),
        step.model.register_forward_hook(lambda *_: stack.close()),
    ]
    yield
    for hook in hooks:
        hook.remove()


def measured(rounds: int) -> list[float]:
    """Return the milliseconds of each way for a token."""
    torch.set_num_threads(1)
    plain = llama()
    with zg.sharded_init():
        model = llama()
    step = Forward(model)
    ids = torch.arange(16).view(1, 16) + zg.rank()

    def generate(budget: int | None, **options: Any) -> Any:
        step.config.memory.memory_budget = budget
        return step.generate(model, ids, **options)

    def for_each_token(**options: Any) -> Any:
        with gathered_for_each_forward(step):
            return model.generate(ids, **options)

    def gathers(max_new_tokens: int, **options: Any) -> Any:
        for _ in range(max_new_tokens):
            with step.full_parameters():
                pass

    runs: list[Callable[..., Any]] = [
        lambda **options: plain.generate(ids, **options),
        lambda **options: generate(None, **options),
        lambda **options: generate(1, **options),
        for_each_token,
        gathers,
    ]

    def run(way: Callable[..., Any], new: int) -> Any:
        return way(max_new_tokens=new, min_new_tokens=new, do_sample=False)

    tokens = [run(way, 2) for way in runs[:-1]]
    assert all(torch.equal(other, tokens[0]) for other in tokens)
    return per_token([functools.partial(run, way, NEW) for way in runs], rounds)


def per_token(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Run each in turn and return its milliseconds for a token."""
    return [seconds / NEW * 1e3 for seconds in medians(runs, rounds)]


def between_hosts(rounds: int) -> list[float]:
    """Return what :func:`measured` does between two network namespaces."""
    with two_hosts(RATE) as hosts:
        # The namespaces share memory, which two hosts do not.
        command = [sys.executable, __file__, "--measure", str(rounds)]
        printed = run_ranks(command, 2, {"ZEROGRAPH_WIRE": "sockets"}, hosts)
    times: list[float] = json.loads(printed[0].splitlines()[-1])
    return times


class DecodeGraph:
    """The decode step of a model as one graph of ATen operators, which reads and writes a static cache."""

    def __init__(self, model: Any) -> None:
        self._model, self._graph = model, None

    def __call__(self, *, past_key_values: Any, **inputs: Any) -> Any:
        layers = past_key_values.layers
        state = [tensor for layer in layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        weights = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

        def use(cache: Sequence[torch.Tensor]) -> None:
            for layer, (keys, values, length) in zip(layers, zip(*[iter(cache)] * 3, strict=True), strict=True):
                layer.keys, layer.values, layer.cumulative_length = keys, values, length

        def forward(weights: Any, cache: Any, tensors: Any) -> Any:
            use(cache)
            options = {**inputs, **tensors, "past_key_values": past_key_values}
            return torch.func.functional_call(self._model, weights, (), options).logits

        if self._graph is None:
            self._graph = make_fx(forward, tracing_mode="fake")(weights, state, tensors)
            use(state)
        return CausalLMOutputWithPast(logits=self._graph(weights, state, tensors), past_key_values=past_key_values)


def decoded(hidden: int, layers: int, rounds: int) -> list[float]:
    """Return the milliseconds for a token in one process: dynamic cache, static cache, as a graph, with Inductor."""
    torch.set_num_threads(1)
    model, ids = llama(hidden, layers), torch.arange(16).view(1, 16)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}

    def run(compiled: Callable[..., Any] | None, **more: Any) -> Any:
        # What transformers does on GPUs.
        with patch.multiple(
            model,
            create=True,
            _valid_auto_compile_criteria=lambda *_: compiled is not None,
            get_compiled_call=lambda _: compiled,
        ):
            return model.generate(ids, **options, **more)

    static = {"cache_implementation": "static"}
    graph, kernels = DecodeGraph(model), torch.compile(model.__call__)
    runs = [
        lambda: run(None),
        lambda: run(None, **static),
        lambda: run(graph, **static),
        lambda: run(kernels, **static),
    ]
    with torch.no_grad():
        tokens = [way() for way in runs]
        assert all(torch.equal(other, tokens[0]) for other in tokens)
        return per_token(runs, rounds)


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        times = measured(int(sys.argv[2]))
        if zg.rank() == 0:
            print(json.dumps(times))
        return
    size = sum(parameter.nbytes for parameter in llama().parameters())
    lines = [f"{size / 1e6:.0f} MB of parameters, {NEW} new tokens.", ""]
    print(lines[0])
    table = Table(HEADER)
    pool = Pool(size=2)
    places: dict[str, Callable[[], list[float]]] = {"one host": lambda: pool.run(2, measured, 3)[0]}
    if not unavailable():
        places[f"two hosts, {RATE}"] = lambda: between_hosts(1)
    for place, run in places.items():
        times = run()
        for way, value in zip(WAYS, times, strict=True):
            table.add([place, way, f"{value:.1f}", f"{value / times[1]:.1f}"])
    pool.close()
    names = ["parameters", "dynamic cache", "static cache", "as a graph", "with Inductor"]
    lines += [*table, "", "One process, ms per token:", ""]
    table = Table(names)
    for hidden, layers in ((1024, 4), (256, 8)):
        size = sum(parameter.nbytes for parameter in llama(hidden, layers).parameters())
        table.add([f"{size / 1e6:.0f} MB", *(f"{value:.1f}" for value in decoded(hidden, layers, 3))])
    command = f"`python benchmarks/generate.py`, torch {torch.__version__}, transformers {transformers.__version__}"
    write("Generating between steps", command, __doc__, *lines, *table)


if __name__ == "__main__":
    main()
