"""The ``Trainer`` of transformers, whose training steps are graphs with ZeRO.

``compute_loss`` is one recorded function that sees the whole batch of all ranks, as in one process. What it counts and
averages, such as the tokens that a label does not mask, is therefore that of the whole batch.

With ``zero={"loop": "eager"}`` nothing is recorded: the trainer runs as in one process, on global tensors.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zerograph.graph import building
from zerograph.integrations import state
from zerograph.integrations.accelerate import STATE, Accelerator, load_loop, save_loop
from zerograph.integrations.checks import check_labels
from zerograph.integrations.eager import whole
from zerograph.integrations.options import Zero, config_of, refuse
from zerograph.integrations.readings import Readings, Variant, check_shared_evenly
from zerograph.integrations.replay import Log, Place
from zerograph.integrations.trl import substituted
from zerograph.integrations.unsupported import unsupported, unsupported_trainer
from zerograph.loops.deferred import Deferred, is_replaying, values_of
from zerograph.loops.eager_loop import EagerLoop
from zerograph.loops.loop import Loop
from zerograph.loops.prepare import loop_of, prepare

try:
    import transformers
    from transformers.integrations import neftune
    from transformers.trainer import SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "zerograph.integrations.transformers needs transformers and accelerate: pip install 'zerograph[transformers]'"
    ) from error

# A mixin has no base, but type checkers should see the trainer's methods.
_Mixed: Any = transformers.Trainer if TYPE_CHECKING else object


class ZeroTrainerMixin(_Mixed):
    """Give a subclass of ``transformers.Trainer`` ZeRO: ``class MyTrainer(ZeroTrainerMixin, SomeTrainer)``.

    Args:
        zero: the ZeRO stage, a dict of options, or a :class:`zerograph.Config`. None: stage 2.
        args, kwargs: those of the trainer.

    Raises:
        ConfigError: a training argument is not supported.
    """

    def __init__(self, *args: Any, zero: Zero = None, **kwargs: Any) -> None:
        self._zero = config_of(zero)
        self._accelerator_arguments: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        # Calls of compute_loss() whose values are still to come, see Readings.
        self._unread: list[tuple[Log, Mapping[Place, float], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        super().__init__(*args, **kwargs)
        methods: dict[str, Any] = {"training_step": self._step_with_value}
        if not self.accelerator.is_eager:
            methods = {
                "compute_loss": self._recorded_loss,
                "training_step": self._recorded_step,
                "prediction_step": self._prediction,
            }
            # Before other callbacks, and before the trainer counts the step.
            self.callback_handler.callbacks.insert(0, _ReadAfterStep(self._read))
            self._readings = Readings(self.compute_loss, substituted, only_with_values=["log"])
        # On the instance, so that methods of subclasses are inside.
        for name, method in methods.items():
            setattr(self, name, _around(method, getattr(self, name)))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator: zerograph's."""
        refuse(type(self.args).__name__, unsupported(self.args))
        refuse("trl", unsupported_trainer(type(self)))
        # Counts are those of all ranks anyway, and a loss is not averaged over ranks.
        self.args.average_tokens_across_devices = False
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(zero=self._zero, **self._accelerator_arguments)
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return dict(self._accelerator_arguments)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does. ``resume_from_checkpoint=True`` passes over a checkpoint that was cut off."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = state.last_complete(self.args.output_dir) or True
        if self.accelerator.is_eager:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        with patch.object(neftune, "neftune_post_forward_hook", _add_noise):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    # --- the step ---

    def _step_with_value(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a training step of an eager loop; its loss is whole, since the trainer reads it several times."""
        return whole(step(*args, **kwargs))

    def _recorded_loss(
        self, compute: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        loop = loop_of(model)
        if not isinstance(loop, Loop) or is_replaying() or building():
            return compute(model, inputs, *args, **kwargs)
        check_labels(model, inputs)
        (loss_module,) = (one for one in loop.modules.values() if isinstance(one, _Loss))
        inputs = dict(inputs.items())
        arguments = self.model.training, (model, inputs, *args), kwargs
        variant = Variant() if self._has_stock_loss() else self._readings.variant(*arguments)
        result, reads = loss_module(variant.number, variant.tensors(self.args.device), inputs, *args, **kwargs)
        log = self._readings.log_of(variant.number)
        if log is not None and not variant.is_done:
            if log.counts_samples:
                self._check_shared_evenly(inputs, loop.parts())
            self._unread.append((log, variant.inputs, (model, inputs, *args), kwargs, reads))
        if torch.is_grad_enabled():
            return result
        # Without gradients there is nothing to wait for.
        result = values_of(result)
        self._read()
        return result

    def _has_stock_loss(self) -> bool:
        """Return whether compute_loss() is that of transformers, which depends on its arguments only."""
        own = type(self).compute_loss is transformers.Trainer.compute_loss
        return own and self.compute_loss_func is None and self.label_smoother is None

    def _read(self) -> None:
        """Let compute_loss() read its values, which are computed now."""
        unread, self._unread = self._unread, []
        for log, numbers, args, kwargs, reads in unread:
            values = [self.accelerator.gather(one) if _is_part(one) else values_of(one) for one in reads]
            self._readings.repeat(log, args, kwargs, values, numbers)

    def _check_shared_evenly(self, inputs: Mapping[str, Any], parts: int) -> None:
        rows = next((len(one) for one in inputs.values() if isinstance(one, Tensor) and one.dim()), 0)
        count = int(self.accelerator.reduce(torch.tensor(rows, device=self.args.device), "sum"))
        check_shared_evenly("compute_loss", rows, count, parts)

    def _recorded_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Make a training step; its loss has a value after the update only, and is added to the sum then."""
        loss: Tensor = step(*args, **kwargs)
        self._losses.append(loss)
        return torch.zeros((), device=loss.device)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._read()
        losses, self._losses = self._losses, []
        for loss in losses:
            if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
                # As the trainer does: the average of the losses since the last log.
                tr_loss += tr_loss / max(1, self.state.global_step - self._globalstep_last_logged)
            else:
                tr_loss += loss.to(tr_loss.dtype)
        return super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        count = super()._get_num_items_in_batch(batch_samples, device)
        if not isinstance(count, Tensor) or self.accelerator.num_processes == 1 or self.accelerator.is_eager:
            return count
        return self.accelerator.reduce(count.to(device), "sum")

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # It would read gradients, which the step has yet to compute.
        return False

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.companions = self._companions()
        return super()._prepare_for_training(*args, **kwargs)

    def _companions(self) -> list[nn.Module]:
        """Return the loss, and other models of the trainer, such as a frozen reference or a teacher."""
        own = {id(module) for module in self.model.modules()}
        others = [one for one in vars(self).values() if isinstance(one, nn.Module) and id(one) not in own]
        return others if self.accelerator.is_eager else [_Loss(self.model, self._readings), *others]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the model need not have been trained."""
        if loop_of(self.model) is None:
            prepare(self.model, *self._companions(), config=self.accelerator.zero_config)
        # The trainer repeats a batch's loss for each of its samples; a batch of an eager loop has those of all ranks.
        with self._batch_of_all_ranks() if self.accelerator.is_eager else contextlib.nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def store_flos(self) -> None:
        """Add up the estimated operations; the batches of an eager loop are whole on every rank."""
        if self.accelerator.is_eager:
            self.current_flos /= self.accelerator.num_processes
        super().store_flos()

    def _prediction(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return values_of(step(*args, **kwargs))

    # --- data ---

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        with self._batch_of_all_ranks():
            return super()._get_train_sampler(*args, **kwargs)

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        with self._batch_of_all_ranks():
            return super()._get_eval_sampler(*args, **kwargs)

    @contextlib.contextmanager
    def _batch_of_all_ranks(self) -> Iterator[None]:
        """Show batch sizes of the whole batch, on which the order of samples grouped by length depends."""
        names, ranks = ("per_device_train_batch_size", "per_device_eval_batch_size"), self.accelerator.num_processes
        sizes = {name: getattr(self.args, name) for name in names}
        try:
            for name, size in sizes.items():
                setattr(self.args, name, size * ranks)
            yield
        finally:
            for name, size in sizes.items():
                setattr(self.args, name, size)

    # --- checkpoints ---

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        loop = loop_of(self.model)
        if loop is None or state_dict is not None:
            super()._save(output_dir, state_dict)
        elif getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            # A module computes the prompts that are saved.
            with loop.graph().gathered_parameters():
                super()._save(output_dir)
        else:
            wanted = _in_adapter if hasattr(self.model, "peft_config") else None
            whole = state.whole_state(self.model, loop, here=self.args.should_save, wanted=wanted)
            # PEFT asks modules_to_save for the names in their state, whose values are split.
            named = functools.partialmethod(nn.Module.state_dict, keep_vars=True)
            with patch.object(nn.Module, "state_dict", named):
                super()._save(output_dir, whole)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_loop(self._loop, Path(output_dir) / STATE, write_counts=self.args.should_save)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE).is_dir():
            # Also of a checkpoint that transformers itself wrote.
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_loop(self._loop, Path(checkpoint) / STATE)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random generators; ranks that the checkpoint does not know take those of its first rank."""
        own = "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"
        names = [own, "rng_state_0.pth", "rng_state.pth"]
        there = [name for name in names if checkpoint is not None and (Path(checkpoint) / name).is_file()]
        if checkpoint is None or not there or there[0] == own:
            super()._load_rng_state(checkpoint)
        else:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(Path(checkpoint) / there[0], Path(folder) / own)
                super()._load_rng_state(folder)

    @property
    def _loop(self) -> Loop | EagerLoop:
        loop = loop_of(self.model)
        assert loop is not None
        return loop


class Trainer(ZeroTrainerMixin, transformers.Trainer):
    """As ``transformers.Trainer``, with ZeRO. Another argument: ``zero=``, see :class:`ZeroTrainerMixin`."""


class Seq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):
    """As ``transformers.Seq2SeqTrainer``, with ZeRO. With ``predict_with_generate`` parameters are gathered for it."""


class _Loss(nn.Module):
    """The function ``compute_loss`` of a trainer, recorded as a module: the mode of its model is a mode of its own."""

    # Of the batch: dividing it by the number of micro-batches needs no warning.
    reduction = "mean"

    def __init__(self, model: nn.Module, readings: Readings) -> None:
        super().__init__()
        self.model, self._readings = model, readings

    def forward(
        self, variant: int, numbers: list[Tensor], inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, list[Tensor]]:
        """Call ``compute_loss`` in one of its variants; return its result, and the tensors whose values it reads."""
        return self._readings.traced(self.model.training, (self.model, inputs, *args), kwargs, variant, numbers)


class _ReadAfterStep(transformers.TrainerCallback):
    """Let ``compute_loss()`` read its values while the trainer's state is still that of the step."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Read the values of the step that has just ended."""
        self._read()


def _add_noise(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Add noise to embeddings as transformers' hook of NEFTune does, which reads its bound from a tensor."""
    if not module.training:
        return output
    count = output.new_ones(output.shape[1:]).sum()
    noise: Tensor = (2 * torch.rand_like(output) - 1) * (module.neftune_noise_alpha / count.sqrt())
    return output + noise


def _is_part(value: Tensor) -> bool:
    """Return whether a result has the rows of this rank only."""
    return isinstance(value, Deferred) and value.meta.batch_dim is not None


def _around(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(inner, *args, **kwargs)

    return call


def _in_adapter(name: str, value: Tensor) -> bool:
    """Return whether an entry of a model's state belongs to an adapter, not to the frozen base."""
    return value.requires_grad or any(part in name for part in ("lora_", "ia3_", "vera_", "modules_to_save", "prompt"))
