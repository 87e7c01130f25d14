"""A strategy of Lightning: ``Trainer(strategy=ZeroStrategy(stage=3))``.

The module's steps run as in one process, on global tensors: batches and what is logged are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zerograph.eager.world import world
from zerograph.errors import ConfigError
from zerograph.integrations.eager import ProcessCount, whole
from zerograph.integrations.options import Zero, config_of
from zerograph.integrations.state import whole_state
from zerograph.ir.zero import DEFAULT_STAGE
from zerograph.loops import noise
from zerograph.loops.global_parts import of_batch
from zerograph.loops.loaders import RowsLoader, distributed_sampler, whole_batches, with_others
from zerograph.loops.loop import Loop, count_metrics_once
from zerograph.loops.prepare import loop_of, prepare, release
from zerograph.runtime.job.process_group import agree

try:
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("zerograph.integrations.lightning needs lightning: pip install 'zerograph[lightning]'") from error


class ZeroStrategy(DDPStrategy):
    """Train a ``LightningModule`` with ZeRO; the numbers are those of one process on the batches of all ranks together.

    Args:
        stage: the ZeRO stage, 0 to 3. Default 2.
        zero: all options instead, as a dict or a :class:`zerograph.Config`.
        kwargs: those of ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.
    """

    precision_plugin: Any
    # Whether this rank has got SIGTERM.
    _is_terminated = False

    def __init__(self, stage: int | str = DEFAULT_STAGE, *, zero: Zero = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.zero_config = config_of(stage if zero is None else zero)

    @property
    def world_size(self) -> int:
        """The number of processes. A product or quotient of it and a tensor is an error."""
        count: int = super().world_size
        return count if count == 1 else ProcessCount(count)

    def setup_distributed(self) -> None:
        """Join the processes. Random generators go on as in one process: Lightning would seed them once more."""
        states = noise.states()
        super().setup_distributed()
        noise.restore(states)

    def setup(self, trainer: Any) -> None:
        """Move the model to its device and prepare it with its optimizers."""
        self._check(trainer)
        if self.world_size > 1:
            # It would wait for the other ranks inside of the handler, which may be inside of an exchange with this one.
            trainer._signal_connector._sigterm_notifier_fn = self._note_termination
        # Every rank reads its rows of the whole batches.
        trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        module = self.lightning_module
        called = list(_called_in(module))
        if loop_of(module) is None:
            self.model_to_device()
        release(module, *called)
        optimizers: list[Any] = []
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            optimizers = self.optimizers
        self.setup_precision_plugin()
        release(*optimizers)
        prepare(module, *called, *optimizers, config=self.zero_config)
        self._log_whole(module)
        # A plain tensor is whole.
        self._loop.has_loader = True
        count_metrics_once()
        for wrapped in self._lightning_optimizers:
            # Not that of the class, which sets each gradient.
            wrapped.zero_grad = wrapped.optimizer.zero_grad

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader of this rank's rows of batches of ``batch_size`` times the number of ranks samples."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        loader = whole_batches(dataloader, 1 if distributed_sampler(dataloader) else self.world_size)
        if isinstance(dataloader.batch_sampler, _IndexBatchSamplerWrapper):
            # It tells callbacks which samples a prediction is of.
            loader = with_others(loader, batch_sampler=_IndexBatchSamplerWrapper(loader.batch_sampler))
        # Else Lightning seeds the workers of each rank in another way.
        _auto_add_worker_init_fn(loader, 0)
        return _GlobalLoader(loader, self.zero_config)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``."""
        return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``."""
        return whole(self._run("validation_step", args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step``."""
        return whole(self._run("test_step", args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step``; the result has the rows of all ranks."""
        return whole(self._run("predict_step", args, kwargs))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which runs forward and backward, then the update."""
        result = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
        optimizer.step()
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value, which is that of all ranks."""
        return whole(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, have decided so."""
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return count == self.world_size if all else count > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return a value, which is that of all ranks. One that has a gradient stays global, and keeps it."""
        gathered: Tensor = tensor if tensor.requires_grad else whole(tensor)
        return gathered

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state on rank 0, for a checkpoint. A collective; other ranks hold one bucket at a time."""
        loop = loop_of(self.lightning_module)
        if loop is None:
            state: dict[str, Any] = self.lightning_module.state_dict()
            return state
        return dict(whole_state(self.lightning_module, loop, here=self.is_global_zero))

    def teardown(self) -> None:
        """End the plugins. The model stays where it is: its shards belong to the ranks."""
        self.lightning_module.__dict__.pop("log", None)
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
        """Run a step of the module on global tensors, in the precision of the options.

        After it Lightning ends on all ranks if one has got SIGTERM before.
        """
        # Not by Lightning's reduction, which waits for the device.
        if [1] in agree(world().job, f"{name}() of Lightning", 0, dict, None, [int(self._is_terminated)]):
            self.lightning_module.trainer._signal_connector.received_sigterm = True
        return self._loop.call(getattr(self.lightning_module, name), args, kwargs)

    def _note_termination(self, number: int, _: object) -> None:
        """Note SIGTERM until the next step, and pass it on to the processes that this one has started."""
        if not self._is_terminated and self.launcher is not None:
            self.launcher.kill(number)
        self._is_terminated = True

    def _log_whole(self, module: Any) -> None:
        """Let a module log whole values."""
        log = type(module).log.__get__(module)

        def log_whole(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, value if _is_metric(value) else whole(value), *args, **kwargs)

        # In place of the method, for calls of the steps and of what they call.
        module.log = log_whole

    @property
    def _loop(self) -> Loop:
        loop = loop_of(self.lightning_module)
        assert loop is not None
        return loop


class _GlobalLoader(RowsLoader):
    """Iterate over global batches. Without a position, which other strategies would not find in a checkpoint."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches."""
        return map(of_batch, super().__iter__())


def _called_in(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules with parameters that a ``training_step`` may call: those of lists one by one."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called_in(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _is_metric(value: object) -> bool:
    """Return whether an object is a metric of torchmetrics, or a collection of them."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(value).__mro__)
