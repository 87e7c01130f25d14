"""Work on gradients inside build(): the numbers are plain PyTorch's, and clipping costs one all-reduce of a scalar."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import each_stage, prepare, set_stage, sliced
from tests.models import part
from tests.pool import Pool

Loss = Tensor | tuple[Tensor, ...]


class Net(nn.Module):
    """Shapes that no number of ranks divides, a 0-d parameter, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


class Step(zg.ZeroGraph):
    """``body`` is build(): it is given a model, its optimizers and a batch, here and in plain PyTorch."""

    def __init__(self, body: Callable[..., Loss], model: nn.Module, optimizers: list[Any], stage: int) -> None:
        super().__init__()
        self.body, self.model = [body], model
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        if stage:
            self.set_zero_mode("distributed_split", stage=stage)

    def build(self, x: Tensor, y: Tensor) -> Loss:
        return self.body[0](self.model, self._optimizers, x, y)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def clip(p: float, max_norm: float = 0.05, foreach: bool | None = None) -> Callable[..., Loss]:
    def body(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss, torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, p, foreach=foreach)

    return body


def clip_value(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


def edits_before_and_after_the_norm(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    """The edit makes something of zeros, so padding must not count in the norm."""
    loss = loss_of(model, x, y)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
            p.grad = p.grad * 2 + 0.3
            p.grad += 0.1 * p.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-0.1, 0.1)
    return loss, norm


def groups_apart(model: Any, _: Any, x: Tensor, y: Tensor) -> Loss:
    """Some parameters are clipped, others scaled, one is edited by a tensor of its own shape."""
    loss = loss_of(model, x, y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.first.parameters(), 0.05)
    model.second.weight.grad.mul_(0.1)
    model.second.bias.grad += torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
    return loss, norm, model.second.weight.grad, model.first.bias.grad.norm()


def norm_by_hand(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for g in gradients:
        g.mul_(torch.clamp(0.05 / (norm + 1e-6), max=1.0))
    return loss, norm


def clip_each(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            torch.nn.utils.clip_grad_norm_(p, 0.02)
    return loss


def two_losses_with_clipping_between(model: nn.Module, optimizers: Any, x: Tensor, y: Tensor) -> Loss:
    optimizers[0].zero_grad()
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    first = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    loss_of(model, y @ y.T @ x, y).backward()
    return loss, first, torch.nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], 0.1)


def gradient_penalty(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    point = x.clone().requires_grad_()
    out = model(point)
    (slope,) = torch.autograd.grad(out.sum(), point, create_graph=True)
    loss = F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss


def parameter_penalty(model: Any, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    gradients = torch.autograd.grad(loss, list(model.second.parameters()), create_graph=True)
    total = loss + 0.1 * sum(g.square().sum() for g in gradients)
    total.backward()
    return total


def sam_in_place(model: nn.Module, optimizers: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    loss.backward()
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        old = {p: p.detach().clone() for p in model.parameters() if p.grad is not None}
        for p in old:
            p.add_(0.05 * p.grad / (norm + 1e-12))
    optimizers[0].zero_grad()
    loss_of(model, x, y).backward()
    with torch.no_grad():
        for p, value in old.items():
            p.copy_(value)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return loss, norm


def sam_functional(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    named = {name: p for name, p in model.named_parameters() if name != "unused"}
    loss = loss_of(model, x, y)
    gradients = torch.autograd.grad(loss, list(named.values()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    moved = {name: p + (0.05 * g / norm).detach() for (name, p), g in zip(named.items(), gradients, strict=True)}
    F.mse_loss(torch.func.functional_call(model, moved, (x,)), y).backward()
    return loss


BODIES: dict[str, Callable[..., Loss]] = {
    "clip_norm_1": clip(1.0),
    "clip_norm_2": clip(2.0),
    "clip_norm_3": clip(3.0),
    "clip_norm_inf": clip(float("inf")),
    "clip_norm_0": clip(0.0, 5.0),
    "clip_norm_far_away": clip(2.0, 1e6),
    "clip_more_than_is_updated": clip(2.0),
    "clip_with_foreach": clip(2.0, foreach=True),
    "clip_value": clip_value,
    "edits_before_and_after_the_norm": edits_before_and_after_the_norm,
    "groups_apart": groups_apart,
    "norm_by_hand": norm_by_hand,
    "clip_each": clip_each,
    "two_losses_with_clipping_between": two_losses_with_clipping_between,
    "gradient_penalty": gradient_penalty,
    "parameter_penalty": parameter_penalty,
    "sam_in_place": sam_in_place,
    "sam_functional": sam_functional,
}


def optimizer_of(model: Any, name: str = "") -> torch.optim.Optimizer:
    updated = model.first if name == "clip_more_than_is_updated" else model
    return torch.optim.SGD(updated.parameters(), lr=0.3, momentum=0.9)


def data(dtype: torch.dtype, count: int = 3, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(size, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    return [(one[:, :5].contiguous(), one[:, 5:].contiguous()) for one in made]


def model_of(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for part in value for one in flat(part)]


def in_plain(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the trained state of plain PyTorch on the whole batch."""
    model = model_of(dtype)
    optimizer, returned = optimizer_of(model, name), []
    for x, y in data(dtype):
        model.zero_grad()
        returned += [one.detach().clone() for one in flat(BODIES[name](model, [optimizer], x, y))]
        optimizer.step()
    return returned, model.state_dict()


def in_graph(names: list[str], stages: list[int], dtype: torch.dtype, options: dict[str, Any]) -> dict[Any, Any]:
    """One graph for all stages of a body, so that it is captured once."""
    results = {}
    for name in names:
        model = model_of(dtype)
        step = Step(BODIES[name], model, [optimizer_of(model, name)], 0)
        step.config.set(**options)
        for stage in each_stage(step, stages):
            returned = [one for x, y in data(dtype) for one in flat(step(part(x), part(y)))]
            results[name, stage] = returned, step.state_dict()["modules"]["model"], step.inspect.collectives()
    return results


def check(name: str, result: Any, dtype: torch.dtype, tolerance: float) -> None:
    returned, state, _ = result
    wanted, wanted_state = in_plain(name, dtype)
    for one, other in zip(returned, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
    for key, value in wanted_state.items():
        torch.testing.assert_close(state[key], value, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")


# That stages agree bitwise does not depend on what happens to gradients.
AT_MORE_STAGES = {"clip_norm_2": [0, 1, 2, 3], "two_losses_with_clipping_between": [0, 3]}


# What differs little from another: on one rank only.
VARIANTS = ["clip_norm_3", "clip_norm_far_away", "clip_with_foreach", "clip_norm_0"]


@sliced(
    "name, stages",
    [(name, AT_MORE_STAGES.get(name, [3])) for name in BODIES if name not in VARIANTS],
    [(name, [0, 1, 2, 3]) for name in BODIES],
)
def test_two_ranks_compute_what_plain_pytorch_computes(pool: Pool, name: str, stages: list[int]) -> None:
    mine, others = pool.run(2, in_graph, [name], stages, torch.float64, {"bucket_size": 256})
    first = mine[name, stages[0]]
    check(name, first, torch.float64, 1e-11)
    for (_, stage), result in mine.items():
        assert all(map(torch.equal, result[0], first[0])), f"stage {stage} returns something else"
        assert all(torch.equal(result[1][key], first[1][key]) for key in first[1]), f"stage {stage} differs"
        assert all(map(torch.equal, result[0], others[name, stage][0])), f"ranks differ at stage {stage}"


def test_in_single_precision_and_with_small_parameters_apart(pool: Pool) -> None:
    names = ["clip_norm_2", "clip_norm_inf"]
    mine = pool.run(2, in_graph, names, [0, 2], torch.float32, {"shard_min_size": 10})[0]
    for (name, _), result in mine.items():
        check(name, result, torch.float32, 1e-6)
        assert all(map(torch.equal, flat(list(result[1].values())), flat(list(mine[name, 0][1].values()))))


@pytest.mark.parametrize("name", VARIANTS)
def test_one_rank(name: str) -> None:
    check(name, in_graph([name], [3], torch.float64, {})[name, 3], torch.float64, 1e-11)


def traffic(stages: list[int], p: float, foreach: bool | None = None) -> list[list[Counter[tuple[str, int]]]]:
    """Collectives (kind, bytes of the tensor) of a step without and with clipping, for each stage."""
    found: list[list[Counter[tuple[str, int]]]] = [[] for _ in stages]
    for body in (loss_only, clip(p, foreach=foreach)):
        model = model_of(torch.float32)
        step = Step(body, model, [optimizer_of(model)], 0)
        step.config.zero.bucket_size = 64
        (x, y), *_ = data(torch.float32, 1)
        for stage, pair in zip(stages, found, strict=True):
            set_stage(step, stage)
            prepared = prepare(step, x, y)
            assert len(prepared.context.buckets) > 2
            pair.append(Counter((one.kind, one.tensor_bytes) for one in prepared.collectives()))
    return found


def loss_only(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    loss.backward()
    return loss


@pytest.mark.parametrize(("foreach", "stages"), [(None, [0, 1, 2, 3]), (True, [2])])
def test_clipping_costs_one_all_reduce_of_a_scalar(foreach: bool | None, stages: list[int]) -> None:
    for without, clipped in traffic(stages, 2.0, foreach):
        assert clipped - without == Counter({("all-reduce", 8): 1})
        assert without - clipped == Counter()


def test_clipping_by_the_largest_gathers_one_number_of_each_rank() -> None:
    for without, clipped in traffic([0, 3], float("inf")):
        assert clipped - without == Counter({("all-gather", 2 * 4): 1})


def gan_losses(models: Any, optimizers: Any, x: Tensor, noise: Tensor) -> Any:
    generator, critic = models
    for optimizer in optimizers:
        optimizer.zero_grad()
    made = generator(noise)
    loss = F.softplus(-critic(made)).mean()
    loss.backward(inputs=list(generator.parameters()))
    optimizers[1].zero_grad()
    other = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(x)).mean()
    other.backward()
    torch.nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
    return loss, other


def gan(stages: list[int] | None) -> list[Any]:
    """Losses and parameters of plain PyTorch, or of the graph at each stage."""
    results = []
    for stage in stages or [None]:
        torch.manual_seed(0)
        models = nn.ModuleList(nn.Sequential(nn.Linear(n, 6), nn.Tanh(), nn.Linear(6, m)) for n, m in ((2, 5), (5, 1)))
        models.double()
        kinds = (torch.optim.Adam, torch.optim.RMSprop)
        optimizers = [kind(model.parameters(), lr=1e-2) for kind, model in zip(kinds, models, strict=True)]
        step = None if stage is None else Step(gan_losses, models, optimizers, stage)
        losses = []
        for x, y in data(torch.float64):
            noise = y[:, :2].contiguous()
            if step is not None:
                losses += step(part(x), part(noise))
            else:
                losses += [loss.detach() for loss in gan_losses(models, optimizers, x, noise)]
                for optimizer in optimizers:
                    optimizer.step()
        state = models.state_dict() if step is None else step.state_dict()["modules"]["model"]
        results.append((losses, list(state.values())))
    return results


def test_two_losses_and_two_optimizers(pool: Pool) -> None:
    mine = pool.run(2, gan, [0, 3])[0]
    (losses, state), *_ = gan(None)
    for one in mine:
        assert all(map(torch.equal, one[0] + one[1], mine[0][0] + mine[0][1]))
        for a, b in zip(one[0] + one[1], losses + state, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_the_option_clips_as_the_call_does() -> None:
    (x, y), *_ = data(torch.float64)
    states = []
    for body, option in ((clip(2.0), None), (loss_only, 0.05)):
        model = model_of(torch.float64)
        step = Step(body, model, [optimizer_of(model)], 2)
        step.config.clip_grad_norm = option
        step(x, y)
        states.append(step.state_dict()["modules"]["model"])
        if option is not None:
            # Without the option the step is another one.
            step.config.clip_grad_norm = None
            before = copy.deepcopy(states[-1])
            step(x, y)
            assert not torch.equal(step.state_dict()["modules"]["model"]["first.weight"], before["first.weight"])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def needs_a_finite_norm(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_of(model, x, y)
    loss.backward()
    return loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)


def steps_with_a_finite_norm(option: str) -> dict[str, Tensor]:
    """Run two steps, and between them one whose gradients of rank 0 are infinite."""
    model = model_of(torch.float64)
    step = Step(needs_a_finite_norm, model, [optimizer_of(model)], 3)
    step.config.checks.on_nonfinite = option
    for number, (x, y) in enumerate(data(torch.float64, 3)):
        if number == 1:
            before = step.fingerprint()
            with pytest.raises(zg.NonFiniteError, match="a loss or gradient of step 2 is not finite"):
                step(part(x * float("inf") if zg.rank() == 0 else x), part(y))
            assert step.fingerprint() == before
        else:
            step(part(x), part(y))
    state: dict[str, Tensor] = step.state_dict()["modules"]["model"]
    return state


@pytest.mark.parametrize("option", ["ignore", "raise"])
def test_a_norm_that_must_be_finite_is_looked_at_before_state_changes(pool: Pool, option: str) -> None:
    model = model_of(torch.float64)
    optimizer = optimizer_of(model)
    for x, y in data(torch.float64, 3)[::2]:
        optimizer.zero_grad()
        needs_a_finite_norm(model, None, x, y)
        optimizer.step()
    for state in pool.run(2, steps_with_a_finite_norm, option):
        torch.testing.assert_close(state, dict(model.state_dict()))


def scales_its_loss(model: nn.Module) -> Step:
    step = Step(needs_a_finite_norm, model, [optimizer_of(model)], 2)
    step.config.precision.grad_scaler = zg.GradScaler()
    return step


def test_with_a_scaled_loss_it_is_refused() -> None:
    (x, y), *_ = data(torch.float64)
    with pytest.raises(
        zg.CaptureError, match=r"error_if_nonfinite=True.*\n.*test_gradients.py.*\n.*config.checks.on_nonfinite"
    ):
        scales_its_loss(model_of(torch.float64))(x, y)


KEPT: list[nn.Parameter] = [nn.Parameter(torch.ones(3))]


def clips_what_it_kept(model: nn.Module, _: Any, x: Tensor, y: Tensor) -> Loss:
    loss = loss_only(model, _, x, y)
    torch.nn.utils.clip_grad_norm_(KEPT, 1.0)
    return loss


def assigns_data(model: Any, _: Any, x: Tensor, y: Tensor) -> Loss:
    model.first.bias.data = model.first.bias.data * 2
    return loss_only(model, _, x, y)


def rounds_on_the_way_back(model: Any, _: Any, x: Tensor, y: Tensor) -> Loss:
    with torch.no_grad():
        model.first.bias.add_(0.1)
    loss = loss_only(model, _, x, y)
    with torch.no_grad():
        model.first.bias.sub_(0.1)
    return loss


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (clips_what_it_kept, ["no gradient", "KEPT, 1.0", "self.model.parameters()"]),
        (assigns_data, [".data", "model.first.bias.data * 2", "copy_"]),
        (rounds_on_the_way_back, ["model.first.bias in place", "p.copy_(old)"]),
    ],
)
def test_what_build_must_not_do_with_gradients(body: Callable[..., Loss], words: list[str]) -> None:
    (x, y), *_ = data(torch.float64)
    model = model_of(torch.float64)
    with pytest.raises(zg.CaptureError) as error:
        Step(body, model, [optimizer_of(model)], 2)(x, y)
    assert all(word in str(error.value) for word in words), error.value


def on_a_grid(plain: bool) -> list[list[Tensor]]:
    """Norms and parameters with tensor parallelism beside ZeRO, for the 2-norm and the largest; or of plain PyTorch."""
    results = []
    for p in (2.0, float("inf")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer, returned = optimizer_of(model), []
        if not plain:
            rows, columns = (zg.sbp.broadcast, zg.sbp.split(0)), (zg.sbp.broadcast, zg.sbp.split(1))
            for name, sbp in {"0.weight": rows, "0.bias": rows, "2.weight": columns}.items():
                zg.annotate(model.get_parameter(name), sbp=sbp)
            step = Step(clip(p), model, [optimizer], 2)
            step.config.mesh.placement = zg.placement("cpu", ranks=[[0, 1], [2, 3]])
            step.config.mesh.input_sbp = (zg.sbp.split(0), zg.sbp.broadcast)
        for x, y in data(torch.float64, 2):
            if plain:
                optimizer.zero_grad()
                returned.append(clip(p)(model, None, x, y)[1].detach())
                optimizer.step()
            else:
                row = zg.rank() // 2
                returned.append(step(x.chunk(2)[row], y.chunk(2)[row])[1])
        state = model.state_dict() if plain else step.state_dict()["modules"]["model"]
        results.append([*returned, *state.values()])
    return results


def test_clipping_beside_tensor_parallelism(pool: Pool) -> None:
    for found, wanted in zip(pool.run(4, on_a_grid, False)[0], on_a_grid(True), strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
