"""ColossalAI's engine: a loop whose calls and updates are graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerograph.base.source import warn_user
from zerograph.config import Config
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import CaptureError, ConfigError, InputError
from zerograph.graph import ZeroGraph
from zerograph.loops.containers import map_tensors
from zerograph.loops.loop import Loop
from zerograph.optim.step_hooks import Guard
from zerograph.runtime.job.process_group import rank
from zerograph.runtime.parameters import parameters_of


class Engine:
    """Model, criterion and optimizer of a training loop, as ``colossalai.initialize()`` returns them.

    Args:
        model: the model.
        optimizer: the optimizer; None: the engine only predicts.
        criterion: returns the loss; may be None.
        config: the options. The engine itself accumulates gradients over ``gradient_accumulation_steps`` calls.

    Attributes:
        gradient_accumulation: number of calls of :meth:`step` that make one update.
        training: whether :meth:`train` or :meth:`eval` was called last.
        graph: the :class:`zerograph.ZeroGraph` that makes the updates; print it, or inspect it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Callable[..., Any] | None,
        config: Config,
    ) -> None:
        self._model, self._optimizer, self._criterion = model, optimizer, criterion
        self.training = model.training
        if config.seed is not None:
            # Calls draw from torch's generator.
            torch.manual_seed(config.seed)
        self.gradient_accumulation, config.gradient_accumulation_steps = config.gradient_accumulation_steps, 1
        modules = {"model": model} | ({"criterion": criterion} if isinstance(criterion, nn.Module) else {})
        optimizers = [] if optimizer is None else [optimizer]
        for one in optimizers:
            # Before the graph's own guard, which names the graph.
            self._guard(one)
        self._loop = Loop(modules, optimizers, config)
        self._parameters = [parameter for one in optimizers for parameter in parameters_of(one)]
        self._loop.watch(self._parameters)
        self.graph: ZeroGraph = self._loop.graph(*optimizers)
        # Calls of step() since the last update, and whether backward() was called since the last step().
        self._steps, self._has_loss = 0, False

    @property
    def model(self) -> nn.Module:
        """The model that was passed; its parameters may be sharded."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; its hyperparameters may be changed, its ``step()`` is :meth:`step`."""
        return self._optimizer

    def train(self, mode: bool = True) -> None:
        """Set the training mode of the engine and its model."""
        self.training = mode
        self._model.train(mode)

    def eval(self) -> None:
        """Set evaluation mode: ``engine(x)`` computes without gradients."""
        self.train(False)

    def zero_grad(self) -> None:
        """Clear the gradients. Between the calls that make one update those of the earlier calls stay."""
        if not self._steps:
            self._has_loss = False
            self._loop.zero_grad_of(self._parameters, set_to_none=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on the batch, of which each rank passes its rows.

        Plain tensors are this rank's part along dimension 0, but those of :func:`zerograph.replicated` are whole.
        Results are nested as the model returns them: global tensors of the whole batch, and plain ones in a job of one
        rank. In evaluation and without an optimizer they have no history.
        """
        return self._call(self._model, args, kwargs)

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the criterion to the engine's results and this rank's labels; the loss is that of the whole batch.

        Raises:
            ConfigError: the engine has no criterion.
        """
        if self._criterion is None:
            raise ConfigError("the engine has no criterion: give one to initialize(), or let the model return its loss")
        return self._call(self._criterion, args, kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of a loss, times the loss scale, to those since the last update.

        Args:
            loss: the loss.
            retain_graph: as of ``loss.backward()``: True where another loss of the same forward follows.

        Raises:
            ConfigError: the engine has no optimizer.
            InputError: the loss is no scalar that needs a gradient.
        """
        self._trained()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.60}"
            raise InputError(
                f"engine.backward() was called with {shown}, which is no scalar with a gradient\n"
                "In training (engine.train(), not under torch.no_grad()), compute the loss from what engine(...) "
                "returns; loss.item() and float(loss) are plain numbers."
            )
        scaler = self.graph.config.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        (loss * (scale / self.gradient_accumulation)).backward(retain_graph=retain_graph)
        self._has_loss = True

    def step(self) -> bool:
        """Update parameters by the gradients, and clear these; with accumulation, at each k-th call. A collective.

        Returns:
            Whether parameters were updated: False before an accumulation's last call, and if a gradient overflowed
            under a loss scale.

        Raises:
            ConfigError: the engine has no optimizer.
            InputError: :meth:`backward` was not called since the last step.
            ZeroGraphError: on every rank, before any state changes.
        """
        optimizer = self._trained()
        if not self._has_loss:
            raise InputError("engine.step() without engine.backward(loss) before: there is no loss to minimise")
        self._steps, self._has_loss = self._steps + 1, False
        if self._steps < self.gradient_accumulation:
            return False
        done = self.graph.steps_done
        try:
            self._loop.step(optimizer)
        finally:
            self._steps = 0
            self.zero_grad()
        return self.graph.steps_done > done

    def state_dict(self) -> dict[str, Any]:
        """Return the training state in whole tensors; see :meth:`zerograph.ZeroGraph.state_dict`. A collective.

        In the middle of an accumulation this is the state of the last update, without the calls since then, and a
        warning says so.
        """
        if self._steps and rank() == 0:
            warn_user(
                f"state_dict() after {self._steps} of the {self.gradient_accumulation} calls that make one update is "
                "the state of the last update, without these calls"
            )
        self._loop.hide()
        return self.graph.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on any number of ranks and at any level. A collective.

        Raises:
            InputError: the call is in the middle of an accumulation.
            ConfigError: the state does not fit; nothing has changed then.
        """
        if self._steps:
            raise InputError(
                f"load_state_dict() after {self._steps} of the {self.gradient_accumulation} calls that make one "
                "update, which are not part of the state: call it after the last"
            )
        self._loop.hide()
        self.graph.load_state_dict(state)

    @contextlib.contextmanager
    def full_parameters(self, *, modifier_rank: int | None = None) -> Iterator[None]:
        """Unshard the model for eager use; see :meth:`zerograph.ZeroGraph.full_parameters`."""
        self._loop.hide()
        with self.graph.full_parameters(modifier_rank=modifier_rank):
            yield

    def __repr__(self) -> str:
        return repr(self.graph)

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with_history = self.training and self._optimizer is not None and torch.is_grad_enabled()
        with torch.set_grad_enabled(with_history):
            return map_tensors(self._loop.call(function, args, kwargs), _readable)

    def _trained(self) -> torch.optim.Optimizer:
        """Return the optimizer.

        Raises:
            ConfigError: there is none.
        """
        if self._optimizer is None:
            raise ConfigError("the engine has no optimizer: give one to initialize(), or name one in the configuration")
        return self._optimizer

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the engine clear the gradients of its optimizer, and refuse updates by hand."""

        def refuse() -> NoReturn:
            raise CaptureError(f"{type(optimizer).__name__}.step() was called directly: engine.step() makes the update")

        def zero_grad(set_to_none: bool = True) -> None:
            self.zero_grad()

        optimizer.register_step_pre_hook(Guard(refuse))
        vars(optimizer)["zero_grad"] = zero_grad


def _readable(result: Tensor) -> Tensor:
    """Return a loss that one rank may read alone, as scripts do that print it on rank 0; any other result itself."""
    if isinstance(result, GlobalTensor) and not result.dim():
        return result.to_global(world().whole)
    return result
