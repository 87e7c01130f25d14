"""Mistakes are one clear error that says what to do, on every rank, before any state changes, and never a hang."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, compilations_of, sum_of_squares
from tests.models import TokenLoss, TrainStep, adam_step, adamw, batches, make, part
from tests.pool import Pool
from zerograph.ir.loop import Loop
from zerograph.ir.mesh import line


class Step(zg.ZeroGraph):
    """A step whose build() is given."""

    def __init__(self, build: Callable[..., Any], train: bool = True) -> None:
        super().__init__()
        self.model = nn.Linear(3, 2)
        self._build = build
        if train:
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Any:
        return self._build(self, x)


X = torch.ones(4, 3)


def unchanged(graph: Step) -> bool:
    weight = graph.model.weight
    return type(weight) is nn.Parameter and graph.steps_done == 0 and not compilations_of(graph)


def backward_on_a_vector(self: Step, x: Tensor) -> Tensor:
    loss = self.model(x)
    loss.backward()
    return loss


def no_backward(self: Step, x: Tensor) -> Tensor:
    return self.model(x).mean()


def item(self: Step, x: Tensor) -> Tensor:
    loss = self.model(x).mean()
    if loss.item() > 3:
        loss = loss * 2
    loss.backward()
    return loss


def branch(self: Step, x: Tensor) -> Tensor:
    loss = self.model(x).mean()
    if loss > 3:
        loss = loss * 2
    loss.backward()
    return loss


def by_mask(self: Step, x: Tensor) -> Tensor:
    loss = self.model(x)[x[:, 0] > 0].mean()
    loss.backward()
    return loss


def steps_itself(self: Step, x: Tensor) -> Tensor:
    loss = self.model(x).mean()
    loss.backward()
    self._optimizers[0].step()
    return loss


def writes_a_parameter(self: Step, x: Tensor) -> Tensor:
    loss = self.model(x).mean()
    loss.backward()
    with torch.no_grad():
        self.model.bias.add_(1)
    return loss


FOREIGN = nn.Linear(3, 2)


def foreign(self: Step, x: Tensor) -> Tensor:
    loss = (self.model(x) + FOREIGN(x)).mean()
    loss.backward()
    return loss


def nests(self: Step, x: Tensor) -> Tensor:
    loss = Step(no_backward, train=False)(x)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [
        (backward_on_a_vector, zg.CaptureError, ["not a scalar", "loss.backward()", ".mean()"]),
        (no_backward, zg.CaptureError, ["no parameter a gradient", "backward() inside build()"]),
        (item, zg.CaptureError, ["read a tensor's value", "if loss.item() > 3:", "torch.where"]),
        (branch, zg.CaptureError, ["if loss > 3:", "torch.where"]),
        (by_mask, zg.CaptureError, ["x[:, 0] > 0", "depends on values"]),
        (steps_itself, zg.CaptureError, ["SGD.step()", "itself"]),
        (writes_a_parameter, zg.CaptureError, ["model.bias", "in place"]),
        (foreign, zg.CaptureError, ["belongs to no module"]),
        (nests, zg.CaptureError, ["do not nest"]),
    ],
)
def test_what_build_must_not_do(build: Callable[..., Any], kind: type[Exception], words: list[str]) -> None:
    graph = Step(build)
    with pytest.raises(kind) as error:
        graph(X)
    for word in words:
        assert word in str(error.value)
    if build in (backward_on_a_vector, item, branch, by_mask):
        assert f"{__file__.rsplit('/', 1)[1]}:{_line_of(build, words)}" in str(error.value)
    assert unchanged(graph)


def _line_of(build: Callable[..., Any], words: list[str]) -> int:
    """The line of ``build`` that the message quotes."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    start = build.__code__.co_firstlineno
    return next(n for n in range(start, start + 10) if any(word in lines[n - 1] for word in words))


def test_an_optimizer_of_other_parameters() -> None:
    graph = Step(no_backward, train=False)
    graph.add_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(zg.ConfigError, match="no module of the graph has"):
        graph(X)


def test_backward_without_an_optimizer() -> None:
    graph = Step(lambda self, x: self.model(x).mean().backward(), train=False)
    with pytest.raises(zg.CaptureError, match="no optimizer is registered"):
        graph(X)
    assert unchanged(graph)


def test_optimizers_that_are_no_graph() -> None:
    for optimizer, words in (
        (torch.optim.LBFGS, "several times"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (Choosy, "from other parameters"),
    ):
        model = make("mlp")
        with pytest.raises(zg.CaptureError, match=words):
            TrainStep(model, optimizer(model.parameters()), 2)(*batches("mlp", 1)[0])


class Choosy(torch.optim.SGD):
    """Leaves gradients alone that are small."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].grad.norm() > 1:
            return super().step(closure)
        return None


def test_init_without_super() -> None:
    class Forgot(zg.ZeroGraph):
        def __init__(self) -> None:
            self.model = nn.Linear(3, 2)

    with pytest.raises(zg.ConfigError, match=r"super\(\).__init__\(\) first"):
        Forgot()(X)


def split_parameters() -> None:
    model = make("mlp")
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, 2)
    (x, y), *_ = batches("mlp", 1)
    step(part(x), part(y))
    weight = model[0].weight
    assert weight.shape == (15, 7)
    assert "SplitParameter" in repr(weight)
    for use in (
        lambda: model(x),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.tolist(),
        lambda: model.state_dict(),
        lambda: copy.deepcopy(model),
        lambda: model.double(),
        lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        lambda: optimizer.step(),
    ):
        with pytest.raises(zg.SplitParameterError, match="state_dict"):
            use()
    step(part(x), part(y))


def test_split_parameters_are_an_error_and_never_stale(pool: Pool) -> None:
    pool.run(2, split_parameters)


def replaced_data() -> None:
    step = adam_step("mlp", 0)
    (x, y), *_ = batches("mlp", 1)
    step(part(x), part(y))
    step.model.to(torch.float64)
    with pytest.raises(zg.InputError, match="replaced after"):
        step(part(x), part(y))


def test_whole_parameters_moved_elsewhere(pool: Pool) -> None:
    pool.run(2, replaced_data)


def twice_the_logits() -> nn.Module:
    """Another loss under the same name: nothing but the graph tells."""

    class Twice(TokenLoss):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return super().forward(logits * 2, targets)

    Twice.__qualname__ = TokenLoss.__qualname__
    return Twice()


def ranks_differ(what: str) -> tuple[str, str, bool]:
    """(type of error, message, nothing changed) of a step for which the ranks come with different things."""
    rank = dist.get_rank()
    model = make("mlp")
    step = TrainStep(model, adamw(model), 2, timeout=30)
    (x, y), *_ = batches("mlp", 1)
    x, y = part(x), part(y)
    if what == "later":
        step(x, y)
        step(x[:2], y[:2])
    if what in ("shape", "later") and rank:
        # Ranks may hold unequal numbers of rows, but not of columns.
        x = x[:, :5]
    if what == "dtype" and rank:
        x = x.double()
    if what == "bad" and rank:
        x = x.numpy()
    if what == "graph" and rank:
        model.append(nn.Linear(3, 3))
        step = TrainStep(model, adamw(model), 2, timeout=30)
    if what == "build" and rank:
        step.loss_fn = twice_the_logits()
    if what == "stage" and rank:
        step.set_zero_mode("distributed_split", stage=3)
    try:
        step(x, y)
    except zg.ZeroGraphError as error:
        return type(error).__name__, str(error), type(model[0].weight) is nn.Parameter
    return "nothing", "", False


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["args[0] has shape (4, 7) on rank 0 and (4, 5) on rank 1"]),
        ("dtype", ["float64", "float32"]),
        ("later", ["args[0] has shape (4, 7) on rank 0 and (4, 5) on rank 1"]),
        ("graph", ["parameters: model.4.weight", "nothing"]),
        ("build", ["the emitted graph: line", "mul", "PYTHONHASHSEED"]),
        ("stage", ["configuration", "stage=3"]),
    ],
)
def test_ranks_that_differ(pool: Pool, what: str, words: list[str]) -> None:
    for kind, message, unharmed in pool.run(2, ranks_differ, what):
        assert kind == ("InputError" if what in ("shape", "later") else "RankMismatchError")
        assert unharmed or what == "later"
        for word in words:
            assert word in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_an_operator_that_refuses_dtypes_names_them(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    step = LossStep(model, adamw(model), 0, sum_of_squares, backend="eager")
    with pytest.raises(zg.OperatorError, match="must have the same dtype") as raised:
        step(torch.ones(2, 4, dtype=dtype))
    names = " and ".join(sorted(map(str, (dtype, torch.float32))))
    assert f"It got tensors of {names}: give the batch in the dtype of the parameters" in str(raised.value)
    step(torch.ones(2, 4))
    assert step.steps_done == 1


def test_a_mistake_on_one_rank_is_an_error_on_every_rank(pool: Pool) -> None:
    (kind0, message0, _), (kind1, message1, _) = pool.run(2, ranks_differ, "bad")
    assert (kind0, kind1) == ("RankMismatchError", "InputError")
    assert "rank 1 failed" in message0
    assert "not a tensor" in message0
    assert "not a tensor" in message1


def group_gone() -> None:
    step = adam_step("mlp", 2)
    (x, y), *_ = batches("mlp", 1)
    step(part(x), part(y))
    x, y = part(x), part(y)
    dist.destroy_process_group()
    try:
        with pytest.raises(zg.CommunicationError, match="is gone"):
            step(x, y)
        with pytest.raises(zg.CommunicationError, match="is gone"):
            step.state_dict()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_graph_whose_process_group_is_gone(pool: Pool) -> None:
    pool.run_afresh(2, group_gone)


class Tokens(zg.ZeroGraph):
    """Reads tokens, and guesses one of five classes for each."""

    def __init__(self, micro_batches: int = 1, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm: nn.Module = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.embedding, self.head = nn.Embedding(11, 3), nn.Linear(3, 5)
        self.add_optimizer(torch.optim.AdamW([*self.embedding.parameters(), *self.head.parameters()]))
        self.config.zero.stage = 3
        self.config.gradient_accumulation_steps = micro_batches

    def build(self, x: Tensor, tokens: Tensor, classes: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.norm(x) + self.embedding(tokens)), classes)
        loss.backward()
        return loss


GOOD = torch.ones(4, 3), torch.arange(4), torch.arange(4)
BAD_VALUES = {
    "a token": (
        (GOOD[0], GOOD[1] + 8, GOOD[2]),
        "embedding.default in the forward of embedding",
        "self.embedding",
    ),
    "a class": ((GOOD[0], GOOD[1], GOOD[2] + 2), "in the forward of build()", "cross_entropy"),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_a_value_out_of_range_is_an_error_with_its_line(bad: str, micro_batches: int) -> None:
    batch, where, code = BAD_VALUES[bad]
    step = Tokens(micro_batches)
    step(*GOOD)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(zg.OperatorError, match=r"out of (range|bounds)") as raised:
        step(*batch)
    message = str(raised.value)
    assert where in message
    assert "failed in step 2 on rank 0: " in message
    assert "test_bad_input.py:" in message
    assert code in message
    assert message.endswith("are those before the step.")
    assert isinstance(raised.value.__cause__, (IndexError, RuntimeError))
    after = step.state_dict()
    assert after["steps_done"] == before["steps_done"] == 1
    for name, value in before["modules"]["embedding"].items():
        assert torch.equal(after["modules"]["embedding"][name], value)
    assert torch.isfinite(step(*GOOD))


def test_an_operator_that_fails_behind_batch_norm_leaves_parameters_alone_only() -> None:
    step = Tokens(norm=True)
    step(*GOOD)
    with pytest.raises(zg.OperatorError, match="Parameters and optimizer state are those before the step, buffers may"):
        step(GOOD[0], GOOD[1] + 8, GOOD[2])


def test_memory_that_there_is_not_is_told_as_torch_tells_it() -> None:
    def much(self: Step, x: Tensor) -> Tensor:
        loss = self.model(x.repeat(2**44, 1)).mean()
        loss.backward()
        return loss

    step = Step(much)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        step(X)
    assert not isinstance(raised.value, zg.ZeroGraphError)


def test_memory_that_there_is_not_in_front_of_the_first_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Tokens(2)
    step(*GOOD)

    def much(loop: Loop, operands: Any) -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError("there is none")

    monkeypatch.setattr(Loop, "make_results", much)
    with pytest.raises(torch.OutOfMemoryError, match="there is none"):
        step(*GOOD)


@pytest.mark.parametrize(
    ("train", "left"), [(False, "Nothing was changed"), (True, "Parameters may have been updated in part")]
)
def test_what_a_backend_fails_with_is_told_with_what_it_may_have_changed(train: bool, left: str) -> None:
    def refuses(*_: Any) -> Any:
        raise ValueError("no such value")

    def build(self: Step, x: Tensor) -> Tensor:
        loss = self.model(x).mean()
        if train:
            loss.backward()
        return loss

    step = Step(build, train)
    step.config.backend = lambda graph, example_inputs: refuses
    with pytest.raises(zg.OperatorError, match=f"failed: ValueError: no such value\n{left}"):
        step(X)


def test_an_input_on_another_device_names_both() -> None:
    step = Step(lambda self, x: self.model(x).sum())
    with pytest.raises(zg.InputError, match=r"args\[0\] is on meta, and model.weight on cpu\n.*x.to\('cpu'\)"):
        step(X.to("meta"))
    assert unchanged(step)


def test_a_model_on_the_meta_device_names_the_parameter() -> None:
    step = Step(lambda self, x: self.model(x).sum(), train=False)
    step.model.to("meta")
    with pytest.raises(zg.InputError, match=r"model.weight is on the meta device.*\n.*zg.sharded_init"):
        step(X)
    assert unchanged(step)
    assert step.prepare(line(2, 0, "ranks"), X.to("meta")).graph


def test_a_scalar_may_be_on_another_device_than_the_model() -> None:
    step = Step(lambda self, x: self.model(x["rows"]).sum() * x["scale"], train=False)
    assert torch.isfinite(step({"rows": X, "scale": torch.tensor(2.0)}))
