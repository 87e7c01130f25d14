"""A strategy of Lightning: ``Trainer(strategy=ZeroStrategy(stage=3))``.

``training_step`` is one recorded function that sees the whole batch of all ranks, as in one process. What it logs has a
value after the update, and is logged then.

With ``zero={"loop": "eager"}`` nothing is recorded: the module's steps run as in one process, on global tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zerograph import data
from zerograph._torch import pytree
from zerograph.errors import CaptureError, ConfigError
from zerograph.integrations.eager import RowsOfRank, whole
from zerograph.integrations.metrics import NoValue, Use, collected_uses, is_metric
from zerograph.integrations.options import Zero, config_of
from zerograph.integrations.readings import Readings, Variant, check_shared_evenly
from zerograph.integrations.rows import global_loader
from zerograph.integrations.state import whole_state
from zerograph.ir.zero import DEFAULT_STAGE
from zerograph.loops.deferred import Deferred, values_of
from zerograph.loops.eager_loop import EagerLoop
from zerograph.loops.loop import Loop
from zerograph.loops.prepare import loop_of, prepare, release
from zerograph.runtime.job.process_group import join

try:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("zerograph.integrations.lightning needs lightning: pip install 'zerograph[lightning]'") from error

# The entry of a checkpoint with the counts on which random numbers depend.
_COUNTS = "zerograph"


class ZeroStrategy(DDPStrategy):
    """Train a ``LightningModule`` with ZeRO; the numbers are those of one process on the batches of all ranks together.

    Args:
        stage: the ZeRO stage, 0 to 3, or ``"auto"``. Default 2.
        zero: all options instead, as a dict or a :class:`zerograph.Config`.
        kwargs: those of ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.
    """

    precision_plugin: Any

    def __init__(self, stage: int | str = DEFAULT_STAGE, *, zero: Zero = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.zero_config = config_of(stage if zero is None else zero)
        self.is_eager = self.zero_config.loop == "eager"
        self._recorded: list[_Recorded] = []

    def setup(self, trainer: Any) -> None:
        """Move the model to its device and prepare it with its optimizers."""
        self._check(trainer)
        # Every rank reads its rows of the whole batches.
        trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if loop_of(module) is None:
            self.model_to_device()
        release(module)
        optimizers: list[Any] = []
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            optimizers = self.optimizers
        self.setup_precision_plugin()
        release(*optimizers)
        if self.is_eager:
            self._prepare_eagerly(module, optimizers)
            return
        called = [] if self._steps_are_graphs else list(_called_in(module))
        release(*called)
        prepare(*(module, _Steps(module), *called, *optimizers), config=self.zero_config)
        self._use_own_zero_grad()

    def _prepare_eagerly(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        prepare(module, *optimizers, config=self.zero_config)
        # A plain tensor is whole.
        self._loop.has_loader = True  # type: ignore[union-attr]
        for metric in filter(is_metric, module.modules()):
            # Its state is that of all ranks, and is not added up over them.
            metric.distributed_available_fn = _never  # type: ignore[assignment]
        self._use_own_zero_grad()

    def _use_own_zero_grad(self) -> None:
        for wrapped in self._lightning_optimizers:
            # Not that of the class, which sets each gradient.
            wrapped.zero_grad = wrapped.optimizer.zero_grad

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader of this rank's rows of batches of ``batch_size`` times the number of ranks samples."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        job = join(self.zero_config.timeout, self.zero_config.placement)
        loader = global_loader(dataloader, job, objects=self.is_eager)
        if self.is_eager:
            loader.collate_fn = RowsOfRank(loader.collate_fn, move_data_to_device)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Record the module's ``training_step``; with manual optimization run it as a loop whose calls are recorded."""
        if self.is_eager:
            return self._run("training_step", args, kwargs)
        if self._steps_are_graphs:
            return self._record("training_step", args, kwargs)
        module = self.lightning_module
        with _collecting(module) as logs:
            output = values_of(module.training_step(*args, **kwargs))
        values = {name: values_of(value) for name, (value, _) in logs.items() if isinstance(value, Tensor)}
        measured = [use.tensors for use in logs.uses]
        self._recorded.append(
            _Recorded(logs, values, self._count(args[0]) if values else 0, uses=logs.uses, measured=measured)
        )
        self._flush("training_step")
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's ``validation_step``."""
        return self._compute("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's ``test_step``."""
        return self._compute("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's ``predict_step``; the result has this rank's rows."""
        return self._compute("predict_step", args, kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which records forward and backward, then the step, and log its values."""
        module = self.lightning_module
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        optimizer.step()
        self._flush("training_step")
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over the ranks; that of an eager loop is of all ranks."""
        return whole(tensor) if self.is_eager else super().reduce(values_of(tensor), group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, have decided so."""
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return count == self.world_size if all else count > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the values of all ranks; those of an eager loop are whole."""
        gathered: Tensor = whole(tensor) if self.is_eager else super().all_gather(tensor, group, sync_grads)
        return gathered

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state on rank 0, for a checkpoint. A collective; other ranks hold one bucket at a time."""
        loop = loop_of(self.lightning_module)
        if loop is None:
            state: dict[str, Any] = self.lightning_module.state_dict()
            return state
        return dict(whole_state(self.lightning_module, loop, here=self.is_global_zero))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning, which loads with any strategy and on any number of ranks."""
        loop = loop_of(self.lightning_module)
        counts = {_COUNTS: {"graphs_done": loop.graphs_done}} if isinstance(loop, Loop) else {}
        super().save_checkpoint(checkpoint | counts, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the optimizers, and continue the sequence of random numbers."""
        super().load_optimizer_state_dict(checkpoint)
        if _COUNTS in checkpoint and isinstance(self._loop, Loop):
            self._loop.graphs_done = int(checkpoint[_COUNTS]["graphs_done"])

    def teardown(self) -> None:
        """End the plugins. The model stays where it is: its shards belong to the ranks."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _check(self, trainer: Any) -> None:
        """Raise for what a step that is one graph does not support, and take over the precision."""
        precision = str(self.precision_plugin.precision)
        if precision == "bf16-mixed":
            self.zero_config.enable_amp(dtype=torch.bfloat16)
            self.precision_plugin = Precision()
        elif precision != "32-true":
            raise ConfigError(f"ZeroStrategy does not support precision={precision!r}: use '32-true' or 'bf16-mixed'")

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step of the module on global tensors, in the precision of the options."""
        module = self.lightning_module
        log = module.log

        def log_whole(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, value if is_metric(value) else whole(value), *args, **kwargs)

        # In place of the method, for calls of the step and of what it calls.
        module.log = log_whole
        try:
            return self._loop.call(getattr(module, name), args, kwargs)
        finally:
            del module.log

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step of the module; remember what it logs."""
        assert isinstance(self._loop, Loop)
        (steps,) = (one for one in self._loop.modules.values() if isinstance(one, _Steps))
        batch, *others = args
        if kwargs or any(not isinstance(one, int) for one in others):
            raise ConfigError(f"{name}() of several loaders, or with keyword arguments, is not supported")
        arguments = (batch, _BatchIndex(), *others[1:])
        readings = steps.readings(name)
        variant = readings.variant(self.lightning_module.training, arguments, {})
        inputs = variant.tensors(self.root_device)
        output, values, reads, measured = steps(variant.number, inputs, name, batch, *others[1:])
        log = readings.log_of(variant.number)
        rows = self._count(batch) if values else 0
        if log is not None and log.counts_samples:
            check_shared_evenly(name, _rows(batch), rows, self._loop.parts())
        repeat = None
        if log is not None and not variant.is_done:
            repeat = functools.partial(readings.repeat, log, arguments, {}, inputs=variant.inputs)
        uses = steps.uses(name, variant)
        self._recorded.append(_Recorded(steps.logs(name, variant), values, rows, repeat, reads, uses, measured))
        return output

    def _compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_eager:
            return whole(self._run(name, args, kwargs))
        output = values_of(self._record(name, args, kwargs))
        self._flush(name)
        return output

    def _flush(self, name: str) -> None:
        """Log the values that recorded steps have logged; they are computed now."""
        recorded, self._recorded = self._recorded, []
        module = self.lightning_module
        before = module._current_fx_name
        module._current_fx_name = name
        try:
            for one in recorded:
                logs = one.logs
                if one.repeat is not None:
                    with _collecting(module) as logs:
                        one.repeat(list(map(_whole, one.reads)))
                results = [use.run(values_of(tensors)) for use, tensors in zip(one.uses, one.measured, strict=True)]
                for key, (value, options) in logs.items():
                    if key in one.values:
                        value = values_of(one.values[key]).detach()
                    elif isinstance(value, NoValue):
                        value = results[value.number]
                    # The weight of the batch in a mean over an epoch: Lightning's own is that of this rank's rows.
                    module.log(key, value, **options | {"batch_size": one.rows or None})
        finally:
            module._current_fx_name = before

    def _count(self, batch: Any) -> int:
        """Return the number of samples of a batch on all ranks."""
        return int(self.reduce(torch.tensor(_rows(batch), device=self.root_device), reduce_op="sum"))

    @property
    def _steps_are_graphs(self) -> bool:
        """True if each training step is recorded as one call; with manual optimization it is a loop."""
        return bool(self.lightning_module.automatic_optimization)

    @property
    def _loop(self) -> Loop | EagerLoop:
        loop = loop_of(self.lightning_module)
        assert loop is not None
        return loop


def _never() -> bool:
    return False


def _called_in(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules with parameters that a ``training_step`` may call: those of lists one by one."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called_in(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _rows(batch: Any) -> int:
    return next((len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


class _Logs(dict[str, tuple[Any, dict[str, Any]]]):
    """Logs of a step by name: a number, a tensor without a value, or a metric; and the options of ``log()``.

    Attributes:
        uses: the calls of metrics.
    """

    uses: list[Use]


@dataclass
class _Recorded:
    """A recorded step of the module.

    Attributes:
        logs: what it logs.
        values: the tensors that it logs, by name.
        rows: number of samples on all ranks.
        repeat: runs its Python once more with the values that it reads; None: it reads none.
        reads: the tensors that it reads.
        uses: its calls of metrics.
        measured: the tensors that each of them gets.
    """

    logs: _Logs
    values: dict[str, Tensor]
    rows: int
    repeat: Callable[[list[Tensor]], None] | None = None
    reads: list[Tensor] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    measured: list[Sequence[Tensor]] = field(default_factory=list)


class _Steps(nn.Module):
    """The steps of a ``LightningModule``, recorded as a module."""

    # Of the batch: dividing it by the number of micro-batches needs no warning.
    reduction = "mean"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

        self._readings: dict[str, Readings] = {}
        # Of each run of a step without values, and of the trace of each step and variant. Changed in place: another
        # object would be a change of the module, for which the graphs would read all modules again.
        self._collected: list[_Logs] = []
        self._traced: dict[tuple[str, int], _Logs] = {}

    def readings(self, name: str) -> Readings:
        """Return the logs of a step."""
        self._collected.clear()
        if name not in self._readings:
            self._readings[name] = Readings(getattr(self.module, name), self._collect)
        return self._readings[name]

    def logs(self, name: str, variant: Variant) -> _Logs:
        """Return what the call that was just recorded logs."""
        return self._collected[-1] if variant.is_done else self._traced[name, variant.number]

    def uses(self, name: str, variant: Variant) -> list[Use]:
        """Return the calls of metrics of the call that was just recorded."""
        return self._traced[name, variant.number].uses

    def forward(
        self, variant: int, inputs: list[Tensor], name: str, batch: Any, *others: int
    ) -> tuple[Any, dict[str, Tensor], list[Tensor], list[Sequence[Tensor]]]:
        """Call a step.

        Returns:
            Its output, the tensors that it logs by name, those whose values it reads, and those of each metric's call.
        """
        collected = list(self._collected)
        self._collected.clear()
        arguments = (batch, _BatchIndex(), *others)
        output, reads = self._readings[name].traced(self.module.training, arguments, {}, variant, inputs)
        # Other runs try values.
        logs, self._collected[:] = self._collected[0], collected
        measured = [use.tensors for use in logs.uses]
        # Tensors of a trace would be kept.
        self._traced[name, variant] = kept = _Logs(logs)
        kept |= {key: (None, options) for key, (value, options) in logs.items() if isinstance(value, Tensor)}
        kept.uses = [replace(use, tensors=()) for use in logs.uses]
        logged = {key: value for key, (value, _) in logs.items() if isinstance(value, Tensor)}
        return output, logged, reads, measured

    @contextlib.contextmanager
    def _collect(self) -> Iterator[None]:
        with _collecting(self.module) as logs:
            self._collected.append(logs)
            yield


@contextlib.contextmanager
def _collecting(module: nn.Module) -> Iterator[_Logs]:
    """Collect what ``module.log()`` is given, while a step is traced or repeated."""
    logs = _Logs()

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            raise CaptureError(f"self.log({name!r}) with positional options: pass prog_bar= and the others by name")
        if isinstance(value, Tensor):
            # An operator, so that logging is one of the calls which are compared.
            logs[name] = value.detach(), kwargs
        elif isinstance(value, NoValue) or is_metric(value):
            logs[name] = value, kwargs
        elif isinstance(value, (int, float)):
            logs[name] = float(value), kwargs
        else:
            raise CaptureError(f"self.log({name!r}) of a {type(value).__name__} in a step that is one graph")

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    vars(module).update(log=log, log_dict=log_dict)
    try:
        with collected_uses(module) as logs.uses:
            yield logs
    finally:
        for name in ("log", "log_dict"):
            vars(module).pop(name, None)


def _whole(value: Tensor) -> Tensor:
    """Return the value of a result; of rows those of all ranks."""
    is_part = isinstance(value, Deferred) and value.meta.batch_dim is not None
    whole: Tensor = values_of(value)
    return data.gather([whole])[0] if is_part else whole


class _BatchIndex(NoValue):
    """The argument ``batch_idx`` of a step that is traced once for all batches: using it is an error."""

    message = (
        "batch_idx is used in a step that is one graph for all batches\nUse it in on_train_batch_start or "
        "on_train_batch_end, or compute with a tensor of the batch."
    )
