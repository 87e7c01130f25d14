"""A strategy of Lightning: ``Trainer(strategy=ZeroStrategy(stage=3))``.

``training_step`` is one recorded function that sees the whole batch of all ranks, as in one process. What it logs has a
value after the update, and is logged then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zerograph._torch import pytree
from zerograph.errors import CaptureError, ConfigError
from zerograph.integrations.options import Zero, config_of
from zerograph.integrations.rows import global_loader
from zerograph.integrations.state import whole_state
from zerograph.loops.deferred import values_of
from zerograph.loops.loop import Loop
from zerograph.loops.prepare import loop_of, prepare, release
from zerograph.runtime.job.process_group import join

try:
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
        stage: the ZeRO stage, 0 to 3, or ``"auto"``.
        zero: all options instead, as a dict or a :class:`zerograph.Config`.
        kwargs: those of ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.
    """

    precision_plugin: Any

    def __init__(self, stage: int | str = 3, *, zero: Zero = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.zero_config = config_of(stage if zero is None else zero)
        self._logged: list[tuple[str, Tensor, dict[str, Any]]] = []

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
        optimizers = []
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            optimizers = self.optimizers
        self.setup_precision_plugin()
        release(*optimizers)
        prepare(module, _Steps(module), *optimizers, config=self.zero_config)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader of this rank's rows of batches of ``batch_size`` times the number of ranks samples."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        return global_loader(dataloader, join(self.zero_config.timeout, self.zero_config.placement))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Record the module's ``training_step``."""
        return self._record("training_step", args, kwargs)

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
        """Reduce a value over the ranks."""
        return super().reduce(values_of(tensor), group, reduce_op)

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
        counts = {} if loop is None else {_COUNTS: {"graphs_done": loop.graphs_done}}
        super().save_checkpoint(checkpoint | counts, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the optimizers, and continue the sequence of random numbers."""
        super().load_optimizer_state_dict(checkpoint)
        if _COUNTS in checkpoint:
            self._loop.graphs_done = int(checkpoint[_COUNTS]["graphs_done"])

    def teardown(self) -> None:
        """End the plugins. The model stays where it is: its shards belong to the ranks."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _check(self, trainer: Any) -> None:
        """Raise for what a step that is one graph does not support, and take over the precision."""
        if trainer.state.fn == TrainerFn.FITTING and not self.lightning_module.automatic_optimization:
            raise ConfigError(
                "ZeroStrategy does not support automatic_optimization = False: training_step is one graph\n"
                "Write the loop yourself, with zg.prepare()."
            )
        precision = str(self.precision_plugin.precision)
        if precision == "bf16-mixed":
            self.zero_config.enable_amp(dtype=torch.bfloat16)
            self.precision_plugin = Precision()
        elif precision != "32-true":
            raise ConfigError(f"ZeroStrategy does not support precision={precision!r}: use '32-true' or 'bf16-mixed'")

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step of the module; remember what it logs."""
        (steps,) = (one for one in self._loop.modules.values() if isinstance(one, _Steps))
        batch, *others = args
        if kwargs or any(not isinstance(one, int) for one in others):
            raise ConfigError(f"{name}() of several loaders, or with keyword arguments, is not supported")
        output, values = steps(name, batch, *others[1:])
        if values:
            # The weight of the batch in a mean over an epoch: Lightning's own is that of this rank's rows.
            rows = self.reduce(torch.tensor(_rows(batch), device=self.root_device), reduce_op="sum")
            for key, value in values.items():
                self._logged.append((key, value, _logs_of(steps)[name][key] | {"batch_size": int(rows)}))
        return output

    def _compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = values_of(self._record(name, args, kwargs))
        self._flush(name)
        return output

    def _flush(self, name: str) -> None:
        """Log the values that recorded steps have logged; they are computed now."""
        logged, self._logged = self._logged, []
        module = self.lightning_module
        before = module._current_fx_name
        module._current_fx_name = name
        try:
            for key, value, options in logged:
                module.log(key, values_of(value).detach(), **options)
        finally:
            module._current_fx_name = before

    @property
    def _loop(self) -> Loop:
        loop = loop_of(self.lightning_module)
        assert loop is not None
        return loop


def _rows(batch: Any) -> int:
    return next((len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


class _Steps(nn.Module):
    """The steps of a ``LightningModule``, recorded as a module."""

    # Of the batch: dividing it by the number of micro-batches needs no warning.
    reduction = "mean"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str, batch: Any, *others: int) -> tuple[Any, dict[str, Tensor]]:
        """Call a step; return its output, and the values that it logs by name."""
        values: dict[str, Tensor] = {}
        options: dict[str, dict[str, Any]] = {}
        with _collecting(self.module, values, options):
            output = getattr(self.module, name)(batch, _BatchIndex(), *others)
        _logs_of(self)[name] = options
        return output, values


# By the module: what each step logs, and how.
_logs: WeakKeyDictionary[nn.Module, dict[str, dict[str, dict[str, Any]]]] = WeakKeyDictionary()


def _logs_of(steps: _Steps) -> dict[str, dict[str, dict[str, Any]]]:
    return _logs.setdefault(steps.module, {})


@contextlib.contextmanager
def _collecting(module: nn.Module, values: dict[str, Tensor], options: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Collect what ``module.log()`` is given, while a step is traced."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            raise CaptureError(f"self.log({name!r}) with positional options: pass prog_bar= and the others by name")
        if not isinstance(value, (Tensor, int, float)):
            raise CaptureError(
                f"self.log({name!r}) of a {type(value).__name__} in a step that is one graph\n"
                "Log a tensor; update metrics in on_train_batch_end or on_validation_batch_end."
            )
        values[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))
        options[name] = kwargs

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    vars(module).update(log=log, log_dict=log_dict)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del vars(module)[name]


class _BatchIndex:
    """The argument ``batch_idx`` of a step that is traced once for all batches: using it is an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            "batch_idx is used in a step that is one graph for all batches\nUse it in on_train_batch_start or "
            "on_train_batch_end, or compute with a tensor of the batch."
        )

    __index__ = __int__ = __float__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]
