"""Steps as tests make them, their prepared graphs, and what plain PyTorch computes from the same beginning.

What several tests of a process need is computed once: :meth:`Case.prepared` and :func:`plain_run` keep their results.
Nobody may change these.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.models import LossStep, TrainStep, adam_step, adamw, batches, make, output_of, train_plainly, update_by
from zerograph.compiler.batch import Batch
from zerograph.compiler.step_key import Snapshot
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh, line
from zerograph.runtime.state import Store

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler on PATH"
)

Options = tuple[tuple[str, Any], ...]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Body = Callable[[nn.Module, Tensor], Tensor]


class Case:
    """A model of ``tests.models`` trained by AdamW at a ZeRO stage, with options of ``step.config``."""

    def __init__(self, model: str, stage: int = 0, **options: Any) -> None:
        self.model, self.stage, self.options = model, stage, options

    def step(self) -> TrainStep:
        """Make a new step."""
        return adam_step(self.model, self.stage, **self.options)

    def prepared(self, ranks: int = 2, size: int = 8) -> Prepared:
        """Return what rank 0 of ``ranks`` would run for its part of a batch of ``size`` samples."""
        return _prepared(self.model, self.stage, tuple(sorted(self.options.items())), ranks, size)


@functools.cache
def _prepared(model: str, stage: int, options: Options, ranks: int, size: int) -> Prepared:
    return prepare(Case(model, stage, **dict(options)).step(), *batches(model, 1, size)[0], ranks=ranks)


def prepare(step: zg.ZeroGraph, *batch: Tensor, ranks: int = 2) -> Prepared:
    """Return what rank 0 of ``ranks`` would run for its part of a whole batch. No process group is needed."""
    return step.prepare(line(ranks, 0, "ranks"), *(tensor.chunk(ranks)[0] for tensor in batch))


@dataclass(frozen=True)
class PlainRun:
    """The losses of plain PyTorch on whole batches, and the model's parameters and buffers after the last."""

    losses: list[Tensor]
    state: dict[str, Tensor]


@functools.cache
def plain_run(model: str, steps: int, size: int = 8, dtype: torch.dtype = torch.float32) -> PlainRun:
    """Train a model of ``tests.models`` by AdamW on one device."""
    module = make(model, dtype)
    return PlainRun(train_plainly(module, adamw(module), batches(model, steps, size, dtype)), module.state_dict())


def sliced(names: str, cases: Iterable[Any], more: Iterable[Any] = ()) -> pytest.MarkDecorator:
    """Parametrize a test: ``make test`` runs a slice of its cases, ``make test-long`` all of them.

    Args:
        names: those of the arguments, separated by commas.
        cases: the slice, a value or a tuple of values each. :func:`covering` divides a product.
        more: the other cases. Those that are in the slice already do not count.
    """
    chosen, others = ([_parameters(case, "," in names) for case in some] for some in (cases, more))
    known = [one.values for one in chosen]
    long = [
        pytest.param(*one.values, marks=[*one.marks, pytest.mark.long], id=one.id)
        for one in others
        if one.values not in known
    ]
    return pytest.mark.parametrize(names, [*chosen, *long])


def _parameters(case: Any, are_several: bool) -> Any:
    return case if hasattr(case, "marks") else pytest.param(*(case if are_several else (case,)))


def covering(cases: Iterable[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    """Divide cases into few, in which each value of each argument is, about as often as the others; and the rest."""
    rest, chosen, times = list(cases), [], Counter[tuple[int, str]]()

    def values(case: tuple[Any, ...]) -> set[tuple[int, str]]:
        return {(place, repr(value)) for place, value in enumerate(case)}

    missing = set[tuple[int, str]]().union(*map(values, rest))
    while missing:
        best = max(rest, key=lambda case: (len(missing & values(case)), -sum(times[one] for one in values(case))))
        rest.remove(best)
        chosen.append(best)
        missing -= values(best)
        times.update(values(best))
    return chosen, rest


def in_turn(cases: Iterable[Any], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Divide a product: each case with one of the others in turn; and the whole. For :func:`sliced`.

    Args:
        cases, others: values, or tuples of values.
    """
    rows = [one if isinstance(one, tuple) else (one,) for one in cases]
    columns = [one if isinstance(one, tuple) else (one,) for one in others]
    chosen = [(*row, *columns[number % len(columns)]) for number, row in enumerate(rows)]
    return chosen, [(*row, *column) for row in rows for column in columns]


def compilations_of(step: zg.ZeroGraph) -> int:
    """Return how often a step has been compiled."""
    return step._compilations


def stores_of(step: zg.ZeroGraph) -> list[Store]:
    """Return this rank's state of each bucket: what it holds of parameters, and of the optimizer's state."""
    return step._stores()


def optimizer_of(step: zg.ZeroGraph) -> torch.optim.Optimizer:
    """Return the first optimizer of a graph."""
    return step._optimizers[0]


def are_graphs(model: nn.Module) -> list[bool]:
    """Return for each kind of calls of a prepared module whether a graph runs them."""
    calls = type(model)._zerograph_prepared.calls  # type: ignore[attr-defined]
    return [kind.graph is not None for kind in calls._kinds.values()]


def kept_steps(step: zg.ZeroGraph) -> int:
    """Return how many compiled steps a graph keeps."""
    return len(step._steps._steps)


def forget_steps(step: zg.ZeroGraph) -> None:
    """Let a graph trace and rewrite its next step anew."""
    step._steps._steps.clear()
    step._steps.last = step._steps._snapshot = None
    step._compiler._captures.clear()
    step._compiler._kept.clear()


def snapshot_of(step: zg.ZeroGraph) -> Snapshot:
    """Return what a graph compares, after equal steps, to know that the next call is like the last one."""
    assert step._steps._snapshot is not None
    return step._steps._snapshot


def recognised(step: zg.ZeroGraph, *args: Any) -> bool:
    """Return whether the next call would run the same step without looking up its facts."""
    return snapshot_of(step).match(step._steps.call_of(step._join(), (args, {}), step._request)) is not None


def batch_on(step: zg.ZeroGraph, ranks: Mesh, *args: Any, **kwargs: Any) -> Batch:
    """Return the batch of a call as it would be on these ranks."""
    return step._steps.inputs_on(ranks, args, kwargs, "cpu", step._request)[1]


def set_stage(step: zg.ZeroGraph, stage: int) -> None:
    """Set a ZeRO stage; 0 is plain data parallel."""
    step.config.set(stage=stage)


def each_stage(step: zg.ZeroGraph, stages: Iterable[int]) -> Iterator[int]:
    """Yield each stage, at which the step begins from its present state. One graph, so captured once."""
    initial = step.state_dict()
    for stage in stages:
        set_stage(step, stage)
        step.load_state_dict(initial)
        yield stage


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Return the length of the difference, relative to the length of the expected values."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def joined(state: dict[str, Tensor]) -> Tensor:
    """Join all tensors of a state, in order of their names, into one of fp64."""
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def told(work: Callable[[], object]) -> tuple[str, str]:
    """Return the kind and the words of the error that a call ends with; the kind "nothing" if with none."""
    try:
        work()
    except (KeyboardInterrupt, zg.ZeroGraphError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def difference(found: Any, wanted: Any, where: str = "state") -> str:
    """Return the place where two nested states first differ in a bit; empty if nowhere."""
    if isinstance(wanted, Tensor):
        return "" if isinstance(found, Tensor) and torch.equal(found, wanted) else where
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            return where
        return next(filter(None, (difference(found[key], wanted[key], f"{where} {key}") for key in wanted)), "")
    if isinstance(wanted, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            return where
        pairs = enumerate(zip(found, wanted, strict=True))
        return next(filter(None, (difference(*pair, f"{where} {at}") for at, pair in pairs)), "")
    return "" if found == wanted else where


def sum_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def mean_of_squares(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch).square().mean()
    return loss


class Step(LossStep):
    """Train a module on ``body(model, x)`` by SGD, at stage 2."""

    def __init__(self, model: nn.Module, body: Body) -> None:
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, body)


class Predict(zg.ZeroGraph):
    """Return ``call(model, *batch)``, by default the model's output; nothing is trained."""

    def __init__(self, model: nn.Module, call: Callable[..., Any] = output_of, **options: object) -> None:
        super().__init__()
        self.model, self.call = model, call
        self.config.set(**options)

    def build(self, *batch: Tensor) -> Any:
        return self.call(self.model, *batch)


class Function(zg.ZeroGraph):
    """Return what a function of the inputs returns."""

    def __init__(self, function: Callable[..., Any], **options: object) -> None:
        super().__init__()
        self._function = function
        self.config.set(**options)

    def build(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)


def model(**buffers: Tensor) -> nn.Module:
    """Make a linear layer of fp64 with these buffers, the same every time."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    for name, value in buffers.items():
        layer.register_buffer(name, value)
    return layer


def two_layers() -> nn.Module:
    """Make a perceptron of fp64 over 4 numbers, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()


def inputs(sizes: list[int]) -> list[Tensor]:
    """Draw one batch of each size: fp64, [size, 4]; the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in sizes]


def as_plain_pytorch(
    module: nn.Module, body: Body, sizes: list[int], change: Callable[[Any], None] | None = None
) -> Step:
    """Train on batches of these sizes, and compare with plain PyTorch.

    Args:
        change: called on the module before each step, here and in plain PyTorch.
    """
    plain = copy.deepcopy(module)
    optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.1), Step(module, body)
    for x in inputs(sizes):
        if change is not None:
            change(plain)
            change(module)
        loss = update_by(optimizer, body(plain, x))
        torch.testing.assert_close(step(x), loss, rtol=1e-12, atol=1e-12)
    trained = step.state_dict()["modules"]["model"]
    torch.testing.assert_close(trained, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    return step
