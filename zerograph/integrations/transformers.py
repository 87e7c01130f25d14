"""The ``Trainer`` of transformers with ZeRO: it runs as in one process, on global tensors.

What ``compute_loss`` counts and averages, such as the tokens that a label does not mask, is that of the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zerograph.integrations import state
from zerograph.integrations.accelerate import STATE, Accelerator, one_process
from zerograph.integrations.eager import whole
from zerograph.integrations.options import Zero, config_of
from zerograph.integrations.unsupported import GENERATING, refuse_unsupported
from zerograph.loops import noise
from zerograph.loops.global_parts import check_equal
from zerograph.loops.loop import Loop
from zerograph.loops.prepare import loop_of, prepare

try:
    import transformers
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
        self._generates = any(kind.__name__ in GENERATING for kind in type(self).__mro__)
        super().__init__(*args, **kwargs)
        managers = (getattr(one, "jit_manager", None) for one in self.callback_handler.callbacks)
        self._saves_on_signal = next((one for one in managers if one is not None), None)
        if self._saves_on_signal is not None:
            self._saves_on_signal._enable_checkpoint = self.accelerator.set_trigger
        # On the instance, so that methods of subclasses are inside.
        name = "training_step"
        setattr(self, name, functools.partial(self._step_with_value, getattr(self, name)))
        if self.accelerator.num_processes > 1:
            _compute_by_operators()
        if self._generates:
            for name in ("training_step", "prediction_step"):
                setattr(self, name, one_process()(getattr(self, name)))
            # TRL seeds each process in another way.
            self.accelerator.draw_as_first()

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator: zerograph's."""
        refuse_unsupported(type(self), self.args)
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
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # --- the step ---

    def _step_with_value(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a training step; its loss is whole, since the trainer reads it several times."""
        if self._saves_on_signal is not None and self.accelerator.check_trigger():
            # Of any rank. All save together, after this step.
            self._saves_on_signal.is_checkpoint_requested = True
        return whole(step(*args, **kwargs))

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        if not self._generates:
            return super()._prepare_inputs(*args, **kwargs)
        # Generated texts are plain tensors, which every rank has.
        self._loop.splits_rows = True
        inputs = super()._prepare_inputs(*args, **kwargs)
        check_equal(inputs, "a batch of generated texts and their rewards")
        return inputs

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.companions = self._companions()
        return super()._prepare_for_training(*args, **kwargs)

    def _companions(self) -> list[nn.Module]:
        """Return other models of the trainer, such as a frozen reference or a teacher."""
        own = {id(module) for module in self.model.modules()}
        return [one for one in vars(self).values() if isinstance(one, nn.Module) and id(one) not in own]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the model need not have been trained."""
        if loop_of(self.model) is None:
            prepare(self.model, *self._companions(), config=self.accelerator.zero_config)
        # The trainer repeats a batch's loss for each of its samples, which are those of all ranks.
        with self._batch_of_all_ranks():
            return super().evaluation_loop(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Every rank has the loss of all: the mean of equal numbers may round.
        with patch("transformers.trainer.nested_gather", lambda loss, _: loss):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def store_flos(self) -> None:
        """Add up the estimated operations; batches are whole on every rank."""
        self.current_flos /= self.accelerator.num_processes
        super().store_flos()

    # --- data ---

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        with self._batch_of_all_ranks():
            return super()._get_train_sampler(*args, **kwargs)

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        with self._batch_of_all_ranks():
            return super()._get_eval_sampler(*args, **kwargs)

    def _batch_of_all_ranks(self) -> contextlib.AbstractContextManager[Any]:
        """Show batch sizes of the whole batch, on which the order of samples grouped by length depends."""
        names, ranks = ("per_device_train_batch_size", "per_device_eval_batch_size"), self.accelerator.num_processes
        sizes: dict[str, Any] = {name: getattr(self.args, name) * ranks for name in names}
        block: contextlib.AbstractContextManager[Any] = patch.multiple(self.args, **sizes)
        return block

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
        self._loop.graph(*self._loop.optimizers).save(Path(output_dir) / STATE)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE).is_dir():
            # Also of a checkpoint that transformers itself wrote.
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            # The trainer restores generators itself, after it has skipped batches: their order is drawn before.
            states = noise.states()
            self._loop.graph(*self._loop.optimizers).load(Path(checkpoint) / STATE)
            noise.restore(states)
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
    def _loop(self) -> Loop:
        loop = loop_of(self.model)
        assert loop is not None
        return loop


class Trainer(ZeroTrainerMixin, transformers.Trainer):
    """As ``transformers.Trainer``, with ZeRO. Another argument: ``zero=``, see :class:`ZeroTrainerMixin`."""


class Seq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):
    """As ``transformers.Seq2SeqTrainer``, with ZeRO. With ``predict_with_generate`` parameters are gathered for it."""


def _compute_by_operators() -> None:
    """Let TRL's fused head of language models call torch's operators: no kernel of Triton reads a global tensor."""
    if (fused := sys.modules.get("trl.kernels.chunked_logprob")) is not None:
        vars(fused).update(_TRITON_AVAILABLE=False, _MM_OUT_DTYPE=False)


def _in_adapter(name: str, value: Tensor) -> bool:
    """Return whether an entry of a model's state belongs to an adapter, not to the frozen base."""
    return value.requires_grad or any(part in name for part in ("lora_", "ia3_", "vera_", "modules_to_save", "prompt"))
