"""Optimizers, traced from their own step(): the numbers of the plain optimizer, whatever its update computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import zerograph as zg
from tests.harness import compilations_of, each_stage, sliced
from tests.models import Batch, TrainStep, part, train_plainly, update_by
from tests.optimizers import Assigning, Branching, GlobalNorm, Lamb, Lars, Lion, Shampoo
from tests.pool import Pool
from zerograph.optim import trace_update

STEPS = 5


def model() -> nn.Module:
    """Three matrices and two biases: no two ranks get as many."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 7, bias=False)).double()


def data() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 7, generator=generator, dtype=torch.float64), torch.randint(0, 7, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() < 2]


def groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    """The biases and the last matrix with hyperparameters of their own."""
    *first, last = matrices(model)
    return [{"params": first}, {"params": [*vectors(model), last], **second}]


Optimizers = list[torch.optim.Optimizer]
SINGLE: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda m: torch.optim.Adam(groups(m, lr=0.003, betas=(0.8, 0.9)), lr=0.01, weight_decay=0.01),
    "amsgrad": lambda m: torch.optim.AdamW(groups(m, weight_decay=0.0), lr=0.01, amsgrad=True, maximize=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(groups(m, weight_decay=0.0), lr=0.01, amsgrad=True, fused=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m, lr=0.02, weight_decay=0.1), lr=0.05),
    "lion": lambda m: Lion(m.parameters(), lr=0.01, decay=0.1),
    "lamb": lambda m: Lamb(groups(m, decay=0.0), lr=0.01, decay=0.1),
    "lars": lambda m: Lars(m.parameters(), lr=0.1),
    "shampoo": lambda m: Shampoo(m.parameters(), lr=0.1),
    "assigning": lambda m: Assigning(m.parameters(), lr=0.05),
    "counting": lambda m: CountingAdam(m.parameters(), "root"),
    "counting, sub": lambda m: CountingAdam(m.parameters(), "sub"),
    "counting, warm-up": lambda m: CountingAdam(m.parameters(), "warm-up"),
    "branching": lambda m: Branching(m.parameters(), lr=0.05, turns=False),
    "turning": lambda m: Branching(groups(m, lr=0.01), lr=0.05, turns=True),
}
OPTIMIZERS: dict[str, Any] = {
    **{name: lambda m, make=make: [make(m)] for name, make in SINGLE.items()},
    "muon": lambda m: [torch.optim.Muon(matrices(m), lr=0.02), torch.optim.AdamW(vectors(m), lr=0.01)],
}
# Whole parameters dealt out to ranks, at every stage.
DEALT = ("muon", "adafactor", "lamb", "shampoo", "turning")


class Step(TrainStep):
    def __init__(self, model: nn.Module, optimizers: Optimizers, stage: int) -> None:
        super().__init__(model, optimizers[0], stage)
        for optimizer in optimizers[1:]:
            self.add_optimizer(optimizer)


def trained(name: str, stage: int, state: dict[str, Any] | None = None, steps: int = STEPS) -> tuple[Tensor, Step]:
    """Losses of some steps from the beginning, or from ``state`` on."""
    net = model()
    step = Step(net, OPTIMIZERS[name](net), stage)
    if state is not None:
        step.load_state_dict(state)
    start = step.steps_done
    losses = [step(part(x), part(y)) for x, y in data()[start : start + steps]]
    return torch.stack(losses), step


def plainly(name: str, steps: int = STEPS) -> tuple[list[Tensor], nn.Module, Optimizers]:
    net = model()
    optimizers = OPTIMIZERS[name](net)
    together = _Together(optimizers)
    return train_plainly(net, together, data()[:steps]), net, optimizers  # type: ignore[arg-type]


class _Together:
    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def over_stages(name: str, stages: list[int], options: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    """One graph for all stages, so that it is captured once."""
    net = model()
    step = Step(net, OPTIMIZERS[name](net), 0)
    step.config.set(**options)
    found = []
    for _ in each_stage(step, stages):
        losses = torch.stack([step(part(x), part(y)) for x, y in data()])
        found.append((losses, step.state_dict()))
    return found


def check(name: str, losses: Tensor, state: dict[str, Any]) -> None:
    """As the plain optimizers: losses, parameters, and every entry of their state."""
    wanted, net, optimizers = plainly(name)
    # The plain ones keep these numbers in fp32, whatever the model's dtype; ours are fp64 and so a little better.
    scale = 1e5 if name in ("nadam", "asgd") else 1.0
    torch.testing.assert_close(losses, torch.stack(wanted), rtol=1e-12 * scale, atol=1e-12 * scale)
    torch.testing.assert_close(
        state["modules"]["model"], dict(net.state_dict()), rtol=1e-10 * scale, atol=1e-12 * scale
    )
    for found, plain in zip(state["optimizers"], optimizers, strict=True):
        held, wanted_held = found["state"], plain.state_dict()["state"]
        assert held.keys() == wanted_held.keys()
        for number, entries in wanted_held.items():
            one = {}
            for entry, value in entries.items():
                if isinstance(value, list):
                    one |= {f"{entry}[{index}]": part for index, part in enumerate(value) if isinstance(part, Tensor)}
                elif entry != "every":
                    one[entry] = value
            torch.testing.assert_close(held[number], one, rtol=1e-10 * scale, atol=1e-12 * scale)


# What is elementwise and differs little from another: on one rank only.
VARIANTS = ("sgd", "momentum", "nesterov", "amsgrad", "nadam", "radam", "adamax", "adadelta", "rmsprop", "rprop")
VARIANTS += ("adagrad", "asgd", "lion", "counting, sub", "counting, warm-up")


# That stages agree does not depend on the optimizer: of those whose parameters are dealt out whole, one shows all.
@sliced(
    "name, stages, options",
    [
        *((name, [2, 0] if name == "muon" else [2], {}) for name in OPTIMIZERS if name not in VARIANTS),
        ("muon", [2], {"shard_by": "parameters"}),
    ],
    [*((name, [2], {}) for name in VARIANTS), *((name, [2, 0, 1, 3], {}) for name in DEALT)],
)
def test_an_optimizer_makes_the_updates_of_the_plain_one(
    pool: Pool, name: str, stages: list[int], options: dict[str, Any]
) -> None:
    results = pool.run(2, over_stages, name, stages, options)[0]
    check(name, *results[0])
    for losses, state in results[1:]:
        assert torch.equal(losses, results[0][0])
        for key, value in state["modules"]["model"].items():
            assert torch.equal(value, results[0][1]["modules"]["model"][key]), key


@sliced("name", VARIANTS, DEALT)
def test_one_rank_alone_makes_the_same_updates(name: str) -> None:
    losses, step = trained(name, 3)
    check(name, losses, step.state_dict())


def work(stage: int, matrices: int) -> tuple[list[str], str]:
    """Return this rank's products in Muon's update of equal matrices, and the printed step."""
    net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(matrices))).double()
    step = Step(net, [torch.optim.Muon(net.parameters(), lr=0.02)], stage)
    step.config.zero.bucket_size = 300
    x, y = torch.randn(8, 6).double(), torch.randint(0, 6, (8,))
    step(part(x), part(y))
    found = [
        str(node.target)
        for name, own in step.inspect.graph_after("localize").named_children()
        if name.startswith("update_")
        for node in own.graph.nodes
        if node.op == "call_module"
    ]
    return found, step.inspect.describe()


@sliced("stage", [2], [0])
def test_muons_work_is_divided_between_the_ranks(pool: Pool, stage: int) -> None:
    results = pool.run(2, work, stage, 4)
    # Two of the four matrices each, all of one shape: one program.
    assert [programs for programs, _ in results] == [["update_0", "update_0"]] * 2
    shown = results[0][1]
    assert "Muon, whole parameters dealt out to ranks: aten." in shown
    assert "torch/optim/_muon.py:" in shown
    assert shown.count("(6, 6)  rank 0") == shown.count("(6, 6)  rank 1") == 2


def saved_and_loaded(name: str, ways: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Two steps at one stage, the rest at another."""
    found = []
    for before, after in ways:
        _, step = trained(name, before, steps=2)
        _, step = trained(name, after, step.state_dict())
        found.append(step.state_dict())
    return found


@sliced("name, ways", [("muon", ((0, 3),))], [(name, ((0, 3), (2, 0))) for name in ("muon", "adafactor", "shampoo")])
def test_state_of_dealt_parameters_moves_between_stages_and_the_plain_optimizer(
    pool: Pool, name: str, ways: tuple[tuple[int, int], ...]
) -> None:
    wanted, net, _ = plainly(name)
    for state in pool.run(2, saved_and_loaded, name, ways)[0]:
        torch.testing.assert_close(state["modules"]["model"], dict(net.state_dict()), rtol=1e-10, atol=1e-12)
    _, step = trained(name, 2, steps=3)
    state = step.state_dict()
    net = model()
    optimizers = OPTIMIZERS[name](net)
    net.load_state_dict(state["modules"]["model"])
    for optimizer, held in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(held)
    losses = train_plainly(net, _Together(optimizers), data()[3:])  # type: ignore[arg-type]
    torch.testing.assert_close(torch.stack(losses), torch.stack(wanted[3:]), rtol=1e-10, atol=1e-12)


def test_fused_updates_of_an_accelerator_read_step_counts_there() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, fused=True)
    # Fake tensors throughout: no such device is needed.
    program = trace_update(optimizer, optimizer.param_groups[0], parameter.shape, parameter.dtype, "cuda")
    assert program.fused is not None
    (update,) = (node for node in program.fused.graph.nodes if "_fused_adamw_" in str(node.target))
    ((count,),) = update.args[5:]
    assert count.target is torch.ops.aten._to_copy.default
    # What torch's CUDA kernel takes a step count for, without a look at it.
    assert count.kwargs == {"dtype": torch.float32, "device": torch.device("cuda")}


def test_fused_updates_are_not_run_while_they_are_traced() -> None:
    operator, mode = torch.ops.aten._fused_adamw_.tensor_lr, FakeTensorMode(allow_fallback_kernels=False)
    with mode, torch.no_grad():
        tensors = [[torch.empty(4)] for _ in range(4)]
        options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
        operator(*tensors, [], [torch.empty(())], lr=torch.empty(()), **options)


def test_an_update_that_reads_other_parameters_is_refused() -> None:
    net = model()
    step = Step(net, [GlobalNorm(net.parameters(), lr=0.1)], 2)
    (x, y), *_ = data()
    with pytest.raises(zg.CaptureError, match=r"GlobalNorm updates a parameter from other .*\n.*clipping"):
        step(x, y)


class CountingAdam(torch.optim.Optimizer):
    """Counts steps in a Python number of each parameter's state, as many optimizers of others do."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if len(state) == 0:
                    state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
                state["step"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                first, second = 1 - 0.9 ** state["step"], 1 - 0.9 ** state["step"]
                if self.kind == "sub":
                    param.subtract_(state["mean"] / first, alpha=group["lr"])
                elif self.kind == "warm-up":
                    rate = group["lr"] * min(1.0, state["step"] / 3)
                    param.sub_(state["mean"] / (state["square"] / second).sqrt() * rate)
                else:
                    root = state["square"].sqrt().div_(math.sqrt(second)).add_(1e-8)
                    param.addcdiv_(state["mean"], root, value=-group["lr"] / first)


class Countable(torch.optim.Optimizer):
    """Counts steps in a number of its groups, or of its own, as many optimizers of others do."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1} | ({"step": 0} if kind == "group" else {}))
        self.kind, self.steps = kind, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            if self.kind == "later":
                group["step"] = group["step"] + 1 if "step" in group else 1
            elif self.kind == "group":
                group["step"] += 1
            count = self.steps if self.kind == "own" else group["step"]
            for param in group["params"]:
                state = self.state[param]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.1)
                param.add_(state["mean"] / (1 - 0.9**count), alpha=-group["lr"] * min(1.0, count / 4))


def countable(kind: str, prepare: Any) -> tuple[list[Tensor], int, Any]:
    torch.manual_seed(0)
    net: nn.Module = nn.Linear(4, 4).double()
    net, optimizer = prepare(net, Countable([{"params": [net.weight]}, {"params": [net.bias]}], kind))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
    for number in range(6):
        if number == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        update_by(optimizer, net(part(x)).square().mean())
    return list(net.state_dict().values()), optimizer.steps, optimizer.param_groups[1].get("step")


def prepared_countable(kind: str, stage: int) -> Any:
    return countable(kind, functools.partial(zg.prepare, stage=stage))


@sliced("kind, stage", [("group", 3), ("own", 2)], [("later", 0)])
def test_a_number_of_an_optimizer_or_its_group_that_counts_steps_is_an_input(pool: Pool, kind: str, stage: int) -> None:
    values, *counts = countable(kind, unprepared)
    for own, *own_counts in pool.run(2, prepared_countable, kind, stage):
        torch.testing.assert_close(own, values, rtol=1e-12, atol=1e-12)
        assert own_counts == counts == [6, None if kind == "own" else 6]
        assert [type(count) for count in own_counts] == [type(count) for count in counts]


def unprepared(*objects: Any) -> tuple[Any, ...]:
    return objects


def test_two_optimizers_of_a_graph_over_one_parameter_are_an_error_that_names_both() -> None:
    net = nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam([net.bias])]
    with pytest.raises(zg.ConfigError, match=r"bias is in two optimizers, .*SGD.* and .*Adam"):
        Step(net, optimizers, 2).compile(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))


class Rebinding(torch.optim.Optimizer):
    """Computes with Python numbers by ``*=``, which binds a name anew and leaves the group's number as it is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                count = self.state[param].setdefault("step", 0)
                self.state[param]["step"] += 1
                rate = group["lr"]
                rate *= 0.5**count
                rate += 0.001
                param.sub_(param.grad, alpha=rate)
                param.mul_(1 - group["lr"])


def as_plainly(
    make: Callable[[nn.Module], torch.optim.Optimizer], change: Callable[[Any, int], object] = lambda *_: None
) -> tuple[Any, Any, Step]:
    """Train plainly and in a graph, and compare the losses, and the parameters in the end.

    Args:
        change: is called with the optimizer and the number of a step before it.

    Returns:
        Both optimizers, and the graph.
    """
    nets = [model(), model()]
    plain, mine = map(make, nets)
    step, losses = Step(nets[1], [mine], 2), []
    for number, batch in enumerate(data()):
        change(plain, number)
        change(mine, number)
        losses.append([*train_plainly(nets[0], plain, [batch]), step(*batch)])
    torch.testing.assert_close(*map(list, zip(*losses, strict=True)), rtol=1e-12, atol=1e-12)
    trained = step.state_dict()["modules"]["model"]
    torch.testing.assert_close(trained, dict(nets[0].state_dict()), rtol=1e-12, atol=1e-12)
    return plain, mine, step


def test_numbers_that_are_bound_anew_do_not_change_in_place() -> None:
    as_plainly(lambda net: Rebinding(net.parameters(), {"lr": 0.1}))


class Objects(torch.optim.Optimizer):
    """Keeps tensors where no graph can have them, indexes by values, or fails on a tensor in place of a number."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind, self.total = kind, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if self.kind == "outside":
                    self.total.add_(1)
                elif self.kind == "values":
                    param[param > 0].add_(1)
                elif self.kind == "number":
                    param.sub_(param.grad, alpha=round(group["lr"]))
                elif self.kind == "later" and state:
                    state["more"] = param.grad.clone()
                elif self.kind == "rate":
                    group["lr"] = group["lr"] * 0.9
                elif self.kind == "memory":
                    state["before"] = param.data
                state["mean"] = param.grad


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("outside", r"Objects keeps tensors in objects of a parameter's state, or outside of it"),
        ("values", r"Objects\.step\(\) has tensors whose shapes depend on values"),
        ("number", r"Objects\.step\(\) cannot be traced .*: TypeError: .*round"),
        ("later", r"has other state, after its first step: more"),
        ("rate", r"Objects\.step\(\) changes its learning rate"),
        ("memory", r"has state that shares memory with other tensors: the parameter and before"),
    ],
)
def test_what_no_update_can_have_is_refused(kind: str, message: str) -> None:
    net = model()
    (x, y), *_ = data()
    with pytest.raises(zg.CaptureError, match=message):
        Step(net, [Objects(net.parameters(), kind)], 2)(x, y)


class Averaging(torch.optim.Optimizer):
    """Keeps the sum of its weights and the highest rate in numbers of its group, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "total": 0.0, "highest": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["highest"] = max(group["lr"], group["highest"])
            group["total"] += group["highest"] * group["lr"]
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["highest"] / group["total"])


def test_numbers_of_a_group_follow_the_optimizers_code() -> None:
    *optimizers, step = as_plainly(
        lambda net: Averaging(net.parameters()),
        lambda optimizer, number: optimizer.param_groups[0].update(lr=(0.1, 0.2, 0.05, 0.05, 0.3)[number]),
    )
    plain, mine = ([one.param_groups[0][name] for name in ("total", "highest")] for one in optimizers)
    assert mine == plain
    assert compilations_of(step) == 1


class Lookahead(torch.optim.Optimizer):
    """Runs another optimizer, as wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_a_wrapper_around_another_optimizer_is_refused() -> None:
    net = model()
    before = [one.clone() for one in net.parameters()]
    with pytest.raises(zg.ConfigError, match=r"Lookahead is a wrapper around SGD, whose step\(\) the graph would not"):
        Step(net, [Lookahead(torch.optim.SGD(net.parameters(), lr=0.1))], 2)
    assert all(map(torch.equal, net.parameters(), before))
