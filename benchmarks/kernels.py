"""Kernels of a step, counted without a card: zerograph's beside those of plain PyTorch, compiled block by block.

python -m benchmarks.kernels                                   # Llama, GPT and the small GPT of benchmarks/gpu.py
python -m benchmarks.kernels llama/1 llama/8 tiny/1            # sizes and numbers of ranks

Inductor generates its code for an H100, which takes no card and no Triton, and nothing is compiled or run: what the
code launches counts. Outside of it each operator that computes or copies counts once, and a fused update as often as it
is launched for so many elements. A card launches more: cuBLAS clears memory for most products, and attention's backward
takes up to three kernels. Of both contenders these are equally many. Triton's kernels are counted too high: of Llama
493 for 462 on an H100, and 496 for 416 of plain PyTorch, so the ratio favours zerograph.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import getitem
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, fx, nn
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.contenders.tasks import Task, blocks  # noqa: E402
from benchmarks.contenders.zerograph import TrainStep  # noqa: E402
from benchmarks.simulated import absent_card, kernels  # noqa: E402
from benchmarks.simulated.sizes import SIZES  # noqa: E402
from benchmarks.tables import line  # noqa: E402
from zerograph import _torch  # noqa: E402
from zerograph.ir.mesh import line as mesh_of  # noqa: E402
from zerograph.runtime.backends.inductor import compile_pieces  # noqa: E402

aten = torch.ops.aten
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_CREATE = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
# torch's fused optimizers: elements of a chunk, chunks and tensors of a launch with two moments.
_CHUNK, _CHUNKS, _TENSORS = 65536, 320, 36


def class_of(name: str) -> str:
    """Return the class of a launch: that of the profiler's names, where it has one."""
    return "products" if set(name.split(".")) & set(_PRODUCTS) else kernels.class_of(name.replace("_to_copy", "memcpy"))


def launched(operator: Any, args: Sequence[Any], results: Any) -> Iterator[str]:
    """Yield what an operator launches on the card that runs by itself."""
    if not isinstance(operator, torch._ops.OpOverload):
        return
    tensors = [leaf for leaf in pytree.tree_leaves((args, results)) if isinstance(leaf, Tensor)]
    if operator.is_view or operator in _CREATE or all(tensor.device.type == "cpu" for tensor in tensors):
        return
    times = _updates([tensor.numel() for tensor in args[0]]) if "_fused_adam" in str(operator) else 1
    yield from [str(operator)] * times


def _updates(sizes: Iterable[int]) -> int:
    """Return the launches of a fused update of tensors of these sizes."""
    launches = tensors = chunks = 0
    for size in sizes:
        tensors += 1
        for _ in range(math.ceil(size / _CHUNK)):
            chunks += 1
            if chunks == _CHUNKS:
                launches, chunks, tensors = launches + 1, 0, 1
        if tensors == _TENSORS and chunks:
            launches, chunks, tensors = launches + 1, 0, 0
    return launches + (chunks > 0)


class _Step(TrainStep):
    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(self.task, self.model, x, y)
        loss.backward()
        return loss


def _loss(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        # In fp32, as autocast of CUDA has it.
        return task.loss(lambda tokens: model(tokens).float(), x, y)


def ours(size: str, ranks: int) -> Counter[str]:
    """Return the launches of zerograph's step on one of some ranks: stage 2 alone, else stage 3."""
    task = SIZES[size].task()
    with torch.device("meta"):
        model = task.model()
    batch = [part.to("meta") for part in task.batches(0)[0]]
    step = _Step(task, model)
    step.config.backend = "inductor"
    step.config.zero.stage = 2 if ranks == 1 else 3
    graph = step.prepare(mesh_of(ranks, 0, "ranks"), *batch, device="meta").graph
    with patch.object(_torch, "inductor", _counted):
        program = compile_pieces(graph)
    return Counter(name for node in program.graph.nodes if node.op == "call_function" for name in _of_node(node))


def _counted(
    graph: fx.GraphModule, values: Sequence[Any], environment: object = None, strides: Sequence[tuple[int, ...]] = ()
) -> Callable[..., Any]:
    """Stand for Inductor: return a function that knows what it would launch."""

    def never(inputs: list[Any]) -> Sequence[Any]:
        raise AssertionError("this step is only looked at")

    never.launches = absent_card.launches(graph, values, "meta", strides)  # type: ignore[attr-defined]
    return never


def _of_node(node: fx.Node) -> Iterable[str]:
    if (piece := getattr(node.target, "launches", None)) is not None:
        return piece  # type: ignore[no-any-return]
    if node.target is getitem or "val" not in node.meta:
        return ()
    args = fx.map_arg(node.args, lambda argument: argument.meta.get("val"))
    return launched(node.target, args, node.meta["val"])


class _Eager(TorchDispatchMode):
    """Count what operators launch on the device that stands for the card, outside of compiled blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()
        self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self.counts and func.namespace == "aten" and not (func.is_view or func in _CREATE):
            self.seen[str(func)] += 1
        return results


class _Block(torch.autograd.Function):
    """A compiled block: results and gradients of the right shapes, and none of its operators."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *tensors: Tensor) -> Tensor:
        ctx.tensors = tensors
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.empty_like(one) if one.requires_grad else None for one in ctx.tensors)


def plain(size: str) -> Counter[str]:
    """Return the launches of plain PyTorch's step, its blocks compiled."""
    task = SIZES[size].task()
    with torch.device("meta"):
        model = task.model()
    # Memory that nothing touches.
    model.to_empty(device="cpu")
    eager = _Eager()
    per_block = Counter[str]()

    def forward_of(block: nn.Module) -> Callable[..., Any]:
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            eager.counts = False
            try:
                if not per_block:
                    per_block.update(_compiled(own, args, kwargs))
                eager.seen.update(per_block)
                tensors = [*block.parameters(), *(one for one in pytree.tree_leaves((args, kwargs)) if _is_float(one))]
                return _Block.apply(lambda: own(*args, **kwargs), *tensors)
            finally:
                eager.counts = True

        return forward

    for block in blocks(model):
        block.forward = forward_of(block)  # type: ignore[method-assign]
    x, y = task.batches(0)[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        batch = mode.from_tensor(x), mode.from_tensor(y)
        with eager:
            _loss(task, model, *batch).backward()
    update = aten._fused_adamw_.default
    eager.seen[str(update)] += _updates([parameter.numel() for parameter in model.parameters()])
    return eager.seen


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _compiled(function: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    """Return what a function and its backward launch that ``torch.compile`` compiles for inputs like these."""
    found: list[str] = []

    def count(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        found.extend(absent_card.launches(fx.GraphModule(graph, _copy(graph)), inputs, "cpu", ()))
        return make_boxed_func(graph.forward)

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compile_fx(graph, inputs, inner_compile=count)
        raise _Counted

    with _disable_current_modes(), functorch.patch(force_non_lazy_backward_lowering=True):
        args, kwargs = pytree.tree_map_only(Tensor, _empty, (args, kwargs))
        try:
            torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
        except _Counted:
            return found
    raise AssertionError("torch.compile has called no backend")


class _Counted(BaseException):
    """Ends a compilation: all is counted."""


def _copy(graph: fx.GraphModule) -> fx.Graph:
    copy = fx.Graph()
    outputs: Any = copy.graph_copy(graph.graph, {})
    copy.output(tuple(output for output in outputs if output is not None))
    return copy


def _empty(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.requires_grad_() if value.requires_grad else made


def table(names: Iterable[str]) -> str:
    """Return launches by class, of zerograph and of plain PyTorch, and their ratio."""
    head = ("step", "contender", *kernels.CLASSES, "all", "ratio")
    rows = [head, ("---", "---", *["---:"] * (len(head) - 2))]
    for name in names:
        size, ranks = name.split("/")
        counts = {"zerograph": ours(size, int(ranks)), "plain PyTorch, compiled": plain(size)}
        base = counts["plain PyTorch, compiled"].total()
        for contender, seen in counts.items():
            by_class = Counter[str]()
            for launch, times in seen.items():
                by_class[class_of(launch)] += times
            cells = (*(str(by_class[what]) for what in kernels.CLASSES), str(seen.total()))
            rows.append((name, contender, *cells, f"{seen.total() / base:.3f}"))
    return "\n".join(map(line, rows))


def main(steps: Annotated[list[str] | None, typer.Argument(help="size/ranks")] = None) -> None:
    """Print the table."""
    print(table(steps or ["llama/1", "gpt/1", "small/1"]))


if __name__ == "__main__":
    typer.run(main)
