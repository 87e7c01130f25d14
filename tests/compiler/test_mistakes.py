"""A newcomer's mistakes, one a line: the error that each gets, with the offending value and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zerograph as zg
from tests.harness import LossStep, optimizer_of
from zerograph.__main__ import app
from zerograph.ir import mesh, sbp

X = torch.ones(4, 3)


class Step(LossStep):
    def __init__(self) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        super().__init__(model, optimizer, loss=lambda model, x: model(x).mean(), backend="eager")


@pytest.fixture(scope="module")
def fresh() -> Step:
    return Step()


@pytest.fixture(scope="module")
def done() -> Step:
    step = Step()
    step(X)
    return step


def option(name: str, value: Any) -> Callable[[], None]:
    return lambda: zg.Config(**{name: value})


def weight() -> nn.Parameter:
    return nn.Linear(2, 2).weight


def here() -> Any:
    return zg.placement("cpu", ranks=[0])


OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: setattr(zg.Config(), "bucketsize", 3), "'bucketsize'; did you mean 'bucket_size'"),
    (lambda: zg.Config().bucketsize, "'bucketsize'; did you mean 'bucket_size'"),  # type: ignore[attr-defined]
    (lambda: delattr(zg.Config().zero, "stage"), "'stage' cannot be deleted: set it to its default, 0"),
    (lambda: zg.Config(bucketsize=3), "'bucketsize'; did you mean 'bucket_size'"),
    (lambda: setattr(Step(), "config", {"stage": 1}), r"config = {'stage': 1}: assign a zerograph.Config"),
    (lambda: setattr(zg.Config(), "zero", 3), "config.zero is a group of options: set those"),
    (lambda: setattr(zg.Config().zero, "memory_budget", 3), "'memory_budget' here: it is config.memory.memory_budget"),
    (option("shard_by", ["elements"]), r"shard_by = \['elements'\]: choose 'elements' or 'parameters'"),
    (option("stage", "2"), "stage = '2': unknown ZeRO stage; choose 0, 1, 2 or 3"),
    (option("stage", 2.0), "stage = 2.0: .* choose 0, 1, 2 or 3"),
    (option("stage", [1]), r"stage = \[1\]: .* choose 0, 1, 2 or 3"),
    (option("stage", True), "stage = True: .* choose 0, 1, 2 or 3"),
    (option("bucket_size", "1MB"), "bucket_size = '1MB': give a whole number of bytes, 1 or more"),
    (option("bucket_size", 0), "bucket_size = 0: give a whole number of bytes, 1 or more"),
    (option("shard_min_size", -1), "shard_min_size = -1: give a whole number of elements, 0 or more"),
    (option("clip_grad_norm", 0.0), "clip_grad_norm = 0.0: .* a number above 0, or None"),
    (option("clip_grad_norm", float("nan")), "clip_grad_norm = nan: .* a number above 0, or None"),
    (option("clip_grad_norm", torch.tensor(1.0)), r"clip_grad_norm = tensor\(1.\): .* a number above 0, or None"),
    (option("memory_budget", "9" * 400 + "GiB"), "999GiB': give bytes"),
    (option("seed", 1.5), "seed = 1.5: give a whole number"),
    (option("seed", 2**70), "seed = 1180591620717411303424: give a whole number of 64 bits"),
    (option("amp_dtype", "bfloat16"), "amp_dtype = 'bfloat16': give torch.bfloat16 or torch.float16"),
    (option("amp_dtype", X), "give torch.bfloat16 or torch.float16"),
    (option("reduce_dtype", torch.int32), "reduce_dtype = torch.int32: give torch.float32"),
    (option("grad_scaler", 1024), "grad_scaler = 1024: give a zerograph.GradScaler"),
    (option("timeout", "10"), "timeout = '10': give seconds, more than 0"),
    (option("timeout", 0), "timeout = 0: give seconds, more than 0"),
    (option("placement", [0, 1]), r"placement = \[0, 1\]: give a placement made by zg.placement"),
    (option("input_sbp", sbp.split(0)), r"input_sbp = S\(0\): give a tuple of"),
    (option("input_sbp", ()), r"input_sbp = \(\): give a tuple of"),
    (option("shard_dims", -1), "shard_dims = -1: give a whole number"),
    (option("activation_checkpointing", True), "activation_checkpointing = True: choose 'none', 'blocks' or 'auto'"),
    (option("backend", "tensorrt"), "backend = 'tensorrt': unknown backend; choose 'auto'"),
    (option("backend", X), "unknown backend; choose 'auto'"),
    (option("batch_norm", "sync"), "batch_norm = 'sync': .* choose 'global' or 'local'"),
    (option("on_missing_rule", "warn"), "on_missing_rule = 'warn': choose 'gather', 'error' or 'discover'"),
    (option("offload", "cpu"), "offload = 'cpu': give a zg.Offload"),
    (lambda: zg.Offload(activations="yes"), r"Offload\(activations='yes'\): choose True or False"),  # type: ignore[arg-type]
    (lambda: zg.Offload(optimizer=3), r"Offload\(optimizer=3\): give 'cpu', a zg.OffloadTo"),  # type: ignore[arg-type]
    (option("gradient_accumulation_steps", 0), "gradient_accumulation_steps = 0: .* 1 or more"),
    (option("gradient_accumulation_steps", 2.0), "gradient_accumulation_steps = 2.0: give a whole number"),
    (option("on_nonfinite", "warn"), "on_nonfinite = 'warn': .*choose 'ignore', 'skip' or 'raise'"),
    (option("check_replicas", 1.5), "check_replicas = 1.5: .*whole number of steps"),
    (option("accumulation_outputs", "mean"), "accumulation_outputs = 'mean': choose 'whole' or 'packed'"),
    (lambda: zg.Config().enable_amp(torch.bfloat16), r"enable_amp\(torch.bfloat16\): .* the dtype as dtype="),  # type: ignore[arg-type]
    (lambda: zg.Config().enable_amp(dtype="bf16"), "amp_dtype = 'bf16': give torch.bfloat16"),  # type: ignore[arg-type]
    (lambda: zg.Offload(optimizer="disk"), "'disk'.* choose 'cpu', 'nvme', or None"),  # type: ignore[arg-type]
    (lambda: zg.Offload(optimizer="nvme"), "give nvme_path, a directory"),
    (lambda: zg.OffloadTo("nvme", nvme_path=3), "nvme_path = 3: give a directory"),  # type: ignore[arg-type]
    (lambda: zg.OffloadTo("cpu", nvme_path="/x"), "nvme_path is for the device 'nvme'"),
    (lambda: zg.OffloadTo("cpu", pin_memory="no"), "pin_memory: choose True or False"),  # type: ignore[arg-type]
    (lambda: zg.OffloadTo("nvme", max_in_cpu=-1, nvme_path="/x"), "max_in_cpu: .* 0 or more"),
    (lambda: zg.GradScaler("a"), "init_scale = 'a': give a number"),  # type: ignore[arg-type]
    (lambda: zg.GradScaler(-1), "init_scale = -1: give a finite number above 0"),
    (lambda: zg.GradScaler(2.0**128), "init_scale = 3.4.*: give a finite number above 0, which fp32 has"),
    (lambda: zg.GradScaler(growth_factor=0.5), "growth_factor = 0.5: give a number above 1"),
    (lambda: zg.GradScaler(growth_interval=1.5), "growth_interval = 1.5: give a whole number"),  # type: ignore[arg-type]
    (lambda: zg.GradScaler(enabled="yes"), "enabled = 'yes': choose True or False"),  # type: ignore[arg-type]
    (lambda: zg.StaticGradScaler(0), "init_scale = 0: give a finite number above 0"),
    (lambda: zg.GradScaler().load_state_dict({}), "no entries, but no scale"),
    (lambda: zg.GradScaler().load_state_dict({"scale": "x"}), "scale = 'x': give a finite number"),
    (lambda: zg.from_deepspeed(3), r"from_deepspeed\(3\): give a dict, or the path"),  # type: ignore[arg-type]
    (lambda: zg.from_deepspeed("nothing.json"), "'nothing.json': No such file"),
    (lambda: zg.from_deepspeed({"zero_optimizations": {}}), "did you mean 'zero_optimization'"),
    (lambda: zg.from_deepspeed({"zero_optimization": {"stage": 7}}), "stage = 7: choose 0, 1, 2 or 3"),
    (lambda: zg.from_deepspeed({"optimizer": {"type": "Foo"}}), "no optimizer 'Foo'\nChoose one of"),
    (lambda: zg.Settings(3), r"Settings\(3\): give options by name"),  # type: ignore[arg-type]
    (lambda: zg.Settings({"stages": 1}), "'stages'; did you mean 'stage'"),
    (lambda: zg.Settings({}, optimizer=3), r"optimizer=3\): give a function"),  # type: ignore[arg-type]
    (lambda: zg.Settings({}).configure(3), "takes a graph's config, not int"),  # type: ignore[arg-type]
    (lambda: zg.Settings({}).set_up(3, []), "takes a graph and its parameters, not int"),  # type: ignore[arg-type]
    (lambda: zg.register_rule("mine::nothing", "m -> m"), "not 'mine::nothing'\nGive what"),
    (lambda: zg.register_rule(torch.relu, "m -> m"), "takes an operator"),
    (lambda: zg.register_rule(torch.ops.aten.lgamma.default, 3), "the rule 3: give a text"),  # type: ignore[call-overload]
    (lambda: zg.register_rule(torch.ops.aten.lgamma.default, "m -> m -> m"), "one arrow '->'"),
    (lambda: zg.register_rule(torch.ops.aten.lgamma.default, "m, n -> m"), "names 2 inputs, there are 1"),
    (lambda: zg.register_rule(torch.ops.aten.lgamma.out, "m, m -> m"), "writes to its arguments: give the rule"),
    (lambda: zg.register_rule(torch.ops.aten.lgamma.default)(3), "decorates a function of the operands, not 3"),  # type: ignore[arg-type]
]

PLACEMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: zg.placement("cpu", ranks=[0, 1]), r"ranks=\[0, 1\]: this job has the ranks 0 to 0"),
    (lambda: zg.placement("cpu", ranks=[0, 0]), r"ranks=\[0, 0\]: .* each at most once"),
    (lambda: zg.placement("cpu", ranks=[]), r"ranks=\[\]: give the ranks as a list of whole numbers"),
    (lambda: zg.placement("cpu", ranks=3), "ranks=3: give the ranks as a list"),  # type: ignore[arg-type]
    (lambda: zg.placement("cpu", ranks=[[0], [1, 2]]), "or as a rectangle of lists"),
    (lambda: zg.placement("tpu", ranks=[0]), "no device 'tpu' here; choose 'cpu'"),
    (lambda: zg.placement(["cpu"], ranks=[0]), r"no device \['cpu'\] here; choose"),  # type: ignore[arg-type]
    (lambda: sbp.split(-1), r"split\(-1\): .* from 0 up"),
    (lambda: sbp.split("0"), r"split\('0'\): .* from 0 up"),  # type: ignore[arg-type]
    (lambda: zg.to_global(X, placement="cpu", sbp=sbp.broadcast), "placement='cpu'.* pass a placement, such as zg"),  # type: ignore[call-overload]
    (lambda: zg.to_global(X, placement=here(), sbp="B"), "'B' is not an SBP: use sbp.broadcast"),  # type: ignore[call-overload]
    (lambda: zg.to_global(X, placement=here(), sbp=sbp.split(2)), r"shape \(4, 3\) has no dimension to be S\(2\)"),
    (lambda: zg.to_global(X, placement=here(), sbp=(sbp.broadcast,) * 2), "has 2 SBPs for a placement of 1"),
    (lambda: zg.to_global(3, placement=here(), sbp=sbp.broadcast), "a tensor or a module, not int"),  # type: ignore[call-overload]
    (lambda: zg.to_global(nn.Linear(2, 2), placement=here(), sbp=sbp.partial_sum), "use broadcast or split"),
    (lambda: zg.to_local(3), "takes a tensor, not int"),  # type: ignore[arg-type]
    (lambda: zg.annotate(X, sbp=sbp.split(0)), "a parameter of a module, not Tensor"),  # type: ignore[arg-type]
    (lambda: zg.annotate(weight(), sbp=3), r"annotate\(sbp=3\): give sbp.split"),  # type: ignore[arg-type]
    (lambda: zg.annotate(weight(), sbp=[]), r"annotate\(sbp=\[\]\): give sbp.split"),
    (lambda: zg.annotate(weight(), sbp=sbp.split(5)), r"shape \(2, 2\) has no dimension to be S\(5\)"),
    (lambda: zg.annotate(weight(), sbp=sbp.partial_sum), r"partial sum .* use broadcast or split"),
    (lambda: zg.local(3), "a module or a function, not 3"),  # type: ignore[type-var]
    (lambda: zg.local(nn.ReLU(), inputs=3), r"inputs=...\) has 3: give sbp.split"),  # type: ignore[call-overload]
    (lambda: zg.local(nn.ReLU(), inputs=sbp.partial_sum), r"has P: give sbp.split\(d\) or sbp.broadcast"),
    (lambda: zg.local(nn.ReLU(), outputs=sbp.broadcast), r"has B: give sbp.split\(d\), or sbp.partial_sum"),
    (lambda: zg.sharded_init("cpu").__enter__(), r"takes a placement, such as zg.placement.* not 'cpu'"),  # type: ignore[arg-type]
]


def changed(**entries: Any) -> Callable[[Step], None]:
    return lambda step: step.load_state_dict({**step.state_dict(), **entries})


def optimizer_state(state: Any, numbers: list[int]) -> list[Any]:
    return [{"state": state, "param_groups": [{"params": numbers}]}]


# Of a graph that has not run, and of one that has.
GRAPHS: list[tuple[Callable[[Step], Any], type[Exception], str]] = [
    (lambda g: g.set_zero_mode("zero"), zg.ConfigError, "mode = 'zero': unknown ZeRO mode"),
    (lambda g: g.set_zero_mode(2), zg.ConfigError, "the stage as stage="),
    (lambda g: g.add_optimizer("adam"), zg.ConfigError, "takes a torch.optim.Optimizer, not str"),
    (lambda g: g.add_optimizer(torch.optim.SGD), zg.ConfigError, "takes a torch.optim.Optimizer, not type"),
    (lambda g: g.add_optimizer(optimizer_of(g)), zg.ConfigError, "registered already"),
    (
        lambda g: g.add_optimizer(torch.optim.SGD([weight()], lr=1), "cosine"),
        zg.ConfigError,
        "'cosine': pass a scheduler of this",
    ),
    (lambda g: g({3}), zg.InputError, r"args\[0\] is \{3\}, not a tensor\n.*Convert it to a tensor"),
    (lambda g: g([X, len]), zg.InputError, r"args\[0\]\[1\] is <built-in function len>, not a tensor"),
    (lambda g: g(x={"ids": b"text"}), zg.InputError, r"x\['ids'\] is b'text', not a tensor"),
    (lambda g: g(X.numpy()), zg.InputError, r"args\[0\] is numpy.ndarray of shape \(.*\), not a tensor\n.*Convert it"),
    (lambda g: g(X.clone().requires_grad_()), zg.InputError, r"args\[0\]\.detach"),
    (lambda g: g(X.to_sparse()), zg.InputError, "sparse_coo: pass a dense tensor .*to_dense"),
    (lambda g: g.prepare(4, X), zg.PlacementError, r"prepare\(4\): .* zerograph.mesh.line"),
    (lambda g: g.prepare(mesh.line(4, 7, "r"), X), zg.PlacementError, r"position=\(7,\).* zerograph.mesh.line"),
    (lambda g: g.prepare(mesh.line(4, 0, "r"), X, device="tpu"), zg.PlacementError, "device='tpu'.* choose 'cpu'"),
    (lambda g: g.load_state_dict(3), zg.ConfigError, "not a state of a graph: it is 3, not a dict\nGive what"),
    (lambda g: g.load_state_dict({}), zg.ConfigError, "not a state of a graph: it is empty\nGive what"),
    (changed(modules=3), zg.ConfigError, "modules is 3, not a dict"),
    (changed(modules={"model": 3}), zg.ConfigError, r"modules\['model'\] is 3, not a dict"),
    (changed(modules={"head": {}}), zg.ConfigError, "has the modules model; the loaded state is of head"),
    (changed(modules={"model": {"weight": X, "bias": X}}), zg.ConfigError, "'model' does not fit the module"),
    (changed(optimizers=[]), zg.ConfigError, "has 1 optimizers, the state 0"),
    (changed(optimizers=[3]), zg.ConfigError, r"optimizers\[0\] is 3, not a dict"),
    (changed(optimizers=optimizer_state({}, [0])), zg.ConfigError, r"groups of \[2\] parameters, .* of \[1\]"),
    (
        changed(optimizers=optimizer_state({0: 3}, [0, 1])),
        zg.ConfigError,
        r"\['state'\]\[0\] is 3, not a dict",
    ),
    (changed(lr_schedulers=[]), zg.ConfigError, "has 1 optimizers, the state 0 lr_schedulers"),
    (changed(steps_done="3"), zg.ConfigError, "steps_done is '3', not a whole number, 0 or more"),
    (changed(steps_done=-3), zg.ConfigError, "steps_done is -3, not a whole number"),
    (changed(random={}), zg.ConfigError, "random lacks seed, passes"),
    (lambda g: g.save(3), zg.CheckpointError, "3 is not a path of a checkpoint: give the path of a folder"),
    (lambda g: g.save(""), zg.CheckpointError, "'' is not a path of a checkpoint: give the path of a folder"),
    (lambda g: g.save("/proc/x"), zg.CheckpointError, "/proc/x cannot be created: No such file"),
    (lambda g: g.save("runs", keep=0), zg.ConfigError, "keep = 0: give a number of checkpoints, 1 or more"),
    (lambda g: g.load(None), zg.CheckpointError, "None is not a path of a checkpoint"),
    (lambda g: g.load("/nothing"), zg.CheckpointError, "no checkpoint in /nothing: it has no index.json"),
    (lambda g: zg.read_checkpoint(3), zg.CheckpointError, "3 is not a path of a checkpoint"),
]
FRESH: list[tuple[Callable[[Step], Any], type[Exception], str]] = [
    (lambda g: g.inspect.graph_after("box"), zg.ConfigError, r"nothing is compiled yet: call the graph, or compile"),
    (lambda g: g.inspect.collectives(), zg.ConfigError, "nothing is compiled yet"),
    (lambda g: g.inspect.memory, zg.ConfigError, "nothing is compiled yet"),
    (lambda g: g.inspect.owners(), zg.ConfigError, "nothing is compiled yet"),
]
DONE: list[tuple[Callable[[Step], Any], type[Exception], str]] = [
    (lambda g: g.inspect.graph_after("boxx"), zg.ConfigError, "no pass 'boxx'; did you mean 'box'"),
    (lambda g: g.inspect.graph_after(["box"]), zg.ConfigError, r"no pass \['box'\]\nThere are capture"),
    (lambda g: optimizer_of(g).step(), zg.SplitParameterError, "Call the graph to update"),
    (
        changed(optimizers=optimizer_state({0: {"momentum_buffer": X}, 1: {"momentum_buffer": X}}, [0, 1])),
        zg.ConfigError,
        r"momentum_buffer of parameter 0 of SGD is of shape \(2, 3\)",
    ),
]


@pytest.mark.parametrize(("call", "words"), OPTIONS)
def test_options(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(zg.ConfigError, match=words):
        call()


@pytest.mark.parametrize(("call", "words"), PLACEMENTS)
def test_placements(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(zg.PlacementError, match=words):
        call()


@pytest.mark.parametrize(("call", "kind", "words"), [*GRAPHS, *FRESH])
def test_a_graph_that_has_not_run(fresh: Step, call: Callable[[Step], Any], kind: type[Exception], words: str) -> None:
    config = fresh.config.key()
    with pytest.raises(kind, match=words):
        call(fresh)
    assert (fresh.steps_done, fresh.config.key(), len(fresh._optimizers)) == (0, config, 1)


@pytest.mark.parametrize(("call", "kind", "words"), [*GRAPHS, *DONE])
def test_a_graph_that_has_run(done: Step, call: Callable[[Step], Any], kind: type[Exception], words: str) -> None:
    before = done.state_dict()["modules"]["model"]
    with pytest.raises(kind, match=words):
        call(done)
    assert done.steps_done == 1
    assert all(torch.equal(before[name], one) for name, one in done.state_dict()["modules"]["model"].items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["CKPT/nothing", "OUT"], "there is no checkpoint in"),
        (["CKPT", "OUT", "--module", "head"], "no module 'head'; it has model"),
        (["CKPT", "/proc/x"], "cannot be written"),
    ],
)
def test_the_command_line(done: Step, tmp_path: Path, arguments: list[str], words: str) -> None:
    done.save(tmp_path / "runs")
    places = {"CKPT": str(tmp_path / "runs"), "OUT": str(tmp_path / "out.safetensors")}
    result = CliRunner().invoke(
        app, ["export", *(one.replace("CKPT", places["CKPT"]).replace("OUT", places["OUT"]) for one in arguments)]
    )
    assert result.exit_code == 2
    assert words in result.output
