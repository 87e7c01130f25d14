"""Accelerate's ``Accelerator`` with ZeRO.

A script runs as it is written, as one process on the batches of all: batches and results are global tensors. Everything
that this class does not define is Accelerate's: trackers, printing, processes, devices, hooks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zerograph._torch import pytree
from zerograph.eager.tensor import GlobalTensor
from zerograph.eager.world import world
from zerograph.errors import ConfigError, InputError
from zerograph.integrations.bitsandbytes import use_plain_linears
from zerograph.integrations.eager import PartToMove, ProcessCount, whole
from zerograph.integrations.options import Zero, config_of, refuse
from zerograph.loops import noise
from zerograph.loops.calls import PURE_HOOKS
from zerograph.loops.containers import map_tensors
from zerograph.loops.global_parts import check_equal
from zerograph.loops.loaders import RowsLoader, whole_batches
from zerograph.loops.loop import Loop
from zerograph.loops.prepare import full_parameters, loop_of, prepare, release

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import (
        DistributedType,
        broadcast_object_list,
        convert_to_fp32,
        send_to_device,
        synchronize_rng_states,
    )
except ImportError as error:
    raise ImportError(
        "zerograph.integrations.accelerate needs accelerate: pip install 'zerograph[accelerate]'"
    ) from error

# The folder of the sharded state.
STATE = "zerograph"
_NUMBERS = itertools.count()


class Accelerator(accelerate.Accelerator):
    """As ``accelerate.Accelerator``, with the numbers of one process on the batches of all processes together.

    Models, optimizers and loaders are prepared as :func:`zerograph.prepare` does it.

    Args:
        zero: the ZeRO stage, a dict of options, or a :class:`zerograph.Config`. None: stage 2.
        args, kwargs: those of ``accelerate.Accelerator``.

    Raises:
        ConfigError: an argument is not supported: fp16 on a CPU, fp8, and plugins of other systems.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zero: Zero = None, **kwargs: Any) -> None:
        self.zero_config = config_of(zero)
        self._has_loader = False
        # Modules of the next loop that other objects of it call, and that have no optimizer themselves.
        self.companions: list[nn.Module] = []
        super().__init__(*args, **kwargs)
        systems = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        refuse(
            "Accelerator",
            (
                # It makes a scaler where it would compute in fp16.
                (
                    "fp16 on a CPU",
                    self.mixed_precision == "fp16" and self.scaler is None,
                    "Accelerate would compute in fp32 without a word; mixed_precision='bf16' (bf16=True) works",
                ),
                (
                    "mixed_precision='fp8'",
                    self.mixed_precision == "fp8",
                    "the step computes in bf16: mixed_precision='bf16'",
                ),
                (
                    "parallelism_config",
                    self.parallelism_config,
                    "a zg.ZeroGraph with config.mesh.placement places a step",
                ),
                ("dispatch_batches=True", self.dispatch_batches, "every rank reads its rows"),
                (
                    f"distributed_type {self.distributed_type}",
                    self.distributed_type not in systems,
                    "ZeRO is zero=, launch with torchrun or 'accelerate launch --multi_gpu' alone",
                ),
                (
                    "dynamo_plugin",
                    getattr(self.state.dynamo_plugin, "backend", "NO") not in ("NO", "no", None),
                    "the graph is compiled by zg.Config(backend='inductor')",
                ),
            ),
        )
        if self.mixed_precision == "bf16" and self.zero_config.precision.amp_dtype is None:
            self.zero_config.enable_amp(dtype=torch.bfloat16)
        if self.mixed_precision == "fp16" and self.zero_config.precision.amp_dtype is None:
            # Without a scaler of the graph: Accelerate's scales the loss, saves its state and holds schedulers.
            self.zero_config.precision.amp_dtype = torch.float16

    @property
    def num_processes(self) -> int:
        """The number of processes. A product or quotient of it and a tensor is an error."""
        count: int = super().num_processes
        return count if count == 1 else ProcessCount(count)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects, and return them in their order.

        A model without its optimizer waits for the call that has the optimizer. Loaders yield this rank's rows of
        batches of ``batch_size`` times the number of processes samples.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ValueError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        places = device_placement or [None] * len(args)  # type: ignore[list-item]
        for one, place in zip(args, places, strict=True):
            if isinstance(one, nn.Module):
                self._admit(one, place)
        optimizers = [
            one
            for one in args
            if isinstance(one, torch.optim.Optimizer) and not getattr(one, "_is_accelerate_prepared", False)
        ]
        if optimizers:
            self._prepare_loop(optimizers)
        # Schedulers need the wrapped optimizers.
        wrapped = [self.prepare_optimizer(one) if isinstance(one, torch.optim.Optimizer) else one for one in args]
        result = tuple(self._prepared(one, place) for one, place in zip(wrapped, places, strict=True))
        return result if len(result) > 1 else result[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to its device. It becomes part of the loop of the next optimizer."""
        self._admit(model, device_placement)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer, so that it waits for the last backward of ``accumulate()``."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            if not any(optimizer is one for one in self._optimizers):
                self._optimizers.append(optimizer)
            return optimizer
        if not any(optimizer is one for loop in self._loops() for one in loop.optimizers):
            self._prepare_loop([optimizer])
        wrapped = AcceleratedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        wrapped._is_accelerate_prepared = True
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler as Accelerate does: it steps once for each process, see its documentation."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return scheduler
        wrapped = AcceleratedScheduler(
            scheduler,
            [one for one in self._optimizers if getattr(scheduler, "optimizer", None) in (one, one.optimizer)]
            or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        wrapped._is_accelerate_prepared = True
        self._schedulers.append(wrapped)
        return wrapped

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of this rank's rows of the batches that one process would read."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if not any(data_loader is one for one in self._dataloaders):
                self._dataloaders.append(data_loader)
            return data_loader
        whole_loader = whole_batches(data_loader, 1 if self.split_batches else self.num_processes)
        place = self.device_placement if device_placement is None else device_placement
        move = send_to_device if place else None
        # Batches that workers have read lead to no loader, but by its number; loaders that skip some have the function.
        number = next(_NUMBERS)
        part = functools.partial(PartToMove, move=move, loader=number)
        rows = RowsLoader(whole_loader, self.zero_config).reading(part)
        vars(rows.collate_fn)["number"] = number
        self._has_loader = True
        self._tell_loops()
        prepared = prepare_data_loader(
            rows,
            self.device,
            num_processes=1,
            process_index=0,
            # Moving rows to the device makes them global.
            put_on_device=True,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        # A batch sampler of our own hides it from Accelerate, which would drop samples of the last batch once more.
        prepared._drop_last = data_loader.drop_last or bool(getattr(data_loader.batch_sampler, "drop_last", False))
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run ``loss.backward()``, divided by the number of accumulation steps, and in fp16 scaled.

        Raises:
            InputError: there are other processes, and a model without its optimizer may have computed the loss.
        """
        is_alone = any(loop_of(model) is None for model in self._models) and not isinstance(loss, GlobalTensor)
        if self.num_processes > 1 and is_alone:
            raise InputError(
                "accelerator.backward() got a loss that no prepared model computed, so each process would train by "
                "itself\nPass the model's optimizer to accelerator.prepare() too, before the first batch."
            )
        steps = self.gradient_accumulation_steps
        loss = loss if steps == 1 else loss / steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients, in fp16 unscaled before; return their norm before."""
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip gradients, in fp16 unscaled before."""
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(list(parameters), clip_value)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a block without effect, so that all stages have the same bits; ``model.no_sync()`` has one."""
        yield

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks in order. Ranks may have unequal numbers of rows.

        A loss that is repeated for the rows of a process's batch (``loss.repeat(batch_size)``) is so for each process.

        Raises:
            RankMismatchError: ranks pass other plain tensors.
        """
        check_equal(tensor, "accelerator.gather()")
        loader, processes = self.gradient_state.active_dataloader, self.num_processes
        rows = 0 if processes == 1 else getattr(loader, "total_batch_size", 0) // processes
        return map_tensors(tensor, lambda one: _of_each_process(one, rows, processes))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks in order, each sample once."""
        if use_gather_object or not all(isinstance(one, Tensor) for one in pytree.tree_leaves(input_data)):
            return whole(input_data)
        loader = self.gradient_state.active_dataloader
        if self.gradient_state.end_of_dataloader and loader.remainder == -1:
            # An iterable dataset, of which Accelerate knows the rows of the last batch by reading on one process.
            rows = PartToMove.rows_of_last.get(getattr(loader.collate_fn, "number", -1), -1)
            loader.remainder = rows if rows < 0 else rows % loader.total_batch_size
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the ranks as Accelerate does. Results of prepared models, such as a loss, are the same on all."""
        check_equal(tensor, "accelerator.reduce()")
        return whole(tensor)

    def check_trigger(self) -> Any:
        """Return whether any process has called ``set_trigger()``. A collective."""
        with patch.object(self, "reduce", super().reduce):
            return super().check_trigger()

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its part of the inputs. Inside, models are whole, and a process calls them alone."""
        with _whole_models(self._models), super().split_between_processes(inputs, apply_padding) as part:
            yield part

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors: they are whole."""
        return tensor

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        super().print(*whole(args), **kwargs)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log values on the main process."""
        super().log(whole(values), *args, **kwargs)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model: preparing does not wrap it."""
        return model

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save all state, of models and optimizers sharded: each rank writes its part."""
        with self._without_sharded():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, loop in enumerate(self._loops()):
            loop.graph(*loop.optimizers).save(Path(folder) / f"{STATE}{number or ''}")
        self.wait_for_everyone()
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what :meth:`save_state` saved, on any number of ranks and at any stage."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(folders, key=lambda folder: int(folder.name.rpartition("_")[2])))
        if input_dir is None:
            raise ConfigError("load_state() needs a folder")
        with self._without_sharded():
            super().load_state(input_dir, load_kwargs, **kwargs)
        # Of ranks that the checkpoint does not know, too.
        self.draw_as_first()
        for number, loop in enumerate(self._loops()):
            loop.graph(*loop.optimizers).load(Path(input_dir) / f"{STATE}{number or ''}")

    def draw_as_first(self) -> None:
        """Give all processes the states of the random generators of the first. A collective."""
        if self.num_processes > 1:
            noise.restore(broadcast_object_list([noise.states()])[0])
            if self.device.type == "cuda":
                synchronize_rng_states(["cuda"])

    def _prepared(self, one: Any, place: bool | None) -> Any:
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one, device_placement=place)
        if isinstance(one, LRScheduler):
            return self.prepare_scheduler(one)
        return one

    def _admit(self, model: nn.Module, place: bool | None) -> None:
        use_plain_linears(model)
        if loop_of(model) is None and (place or (place is None and self.device_placement)):
            model.to(self.device)
        if self.native_amp and not any(one is _in_fp32 for one in model._forward_hooks.values()):
            model.register_forward_hook(_in_fp32)
        if not any(model is one for one in self._models):
            self._models.append(model)
        self._tell_loops()

    def _prepare_loop(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Prepare optimizers with their models, and with those that have no loop yet.

        A model whose optimizer is a new one is prepared again.
        """
        trained = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
        models = [
            one for one in self._models if loop_of(one) is None or any(id(p) in trained for p in one.parameters())
        ]
        release(*models, *self.companions, *optimizers)
        prepare(*models, *self.companions, *optimizers, config=self.zero_config)
        self._tell_loops()

    def _tell_loops(self) -> None:
        """Tell loops whether plain tensors are whole, which they are beside the batches of a loader."""
        for loop in self._loops():
            loop.has_loader = loop.has_loader or self._has_loader

    def _loops(self) -> list[Loop]:
        loops = [loop for model in self._models if (loop := loop_of(model)) is not None]
        return [loop for number, loop in enumerate(loops) if not any(loop is other for other in loops[:number])]

    def _without_sharded(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which models and optimizers are hidden whose state is saved sharded."""
        sharded = {id(one) for loop in self._loops() for one in loop.optimizers}
        shown = functools.partial(_with_models, list(self._models))
        hooks: dict[str, Any] = {
            name: {key: functools.partial(shown, hook) for key, hook in getattr(self, name).items()}
            for name in ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
        }
        models = [one for one in self._models if loop_of(one) is None]
        optimizers = [one for one in self._optimizers if id(one.optimizer) not in sharded]
        hidden: contextlib.AbstractContextManager[Any] = patch.multiple(
            self, _models=models, _optimizers=optimizers, **hooks
        )
        return hidden


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Show one process to all that ask Accelerate: its ``gather`` returns values as they are, whole on every rank."""
    shown = {"num_processes": 1, "process_index": 0, "distributed_type": DistributedType.NO}
    states: list[dict[str, Any]] = [PartialState._shared_state, AcceleratorState._shared_state]
    before = [{name: state[name] for name in shown} for state in states]
    try:
        for state in states:
            state.update(shown)
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.update(values)


def _of_each_process(one: Tensor, rows: int, processes: int) -> Tensor:
    """Return a whole tensor; of a whole loss that is repeated for the rows of one process, that of each process."""
    gathered: Tensor = whole(one)
    is_whole = isinstance(one, GlobalTensor) and one.sbp == world().whole
    if is_whole and one.shape == (rows,) and one.is_floating_point() and (gathered == gathered[0]).all():
        return gathered.repeat(processes)
    return gathered


@contextlib.contextmanager
def _whole_models(models: list[Any]) -> Iterator[None]:
    """Make the parameters of prepared models whole inside the block."""
    with contextlib.ExitStack() as stack:
        for model in {id(loop): model for model in models if (loop := loop_of(model)) is not None}.values():
            stack.enter_context(full_parameters(model))
        yield


def _with_models(models: list[Any], hook: Any, _: Any, *rest: Any) -> None:
    """Call a hook of ``save_state()`` or ``load_state()`` with the prepared models too, whole."""
    with _whole_models(models):
        states = [[model.state_dict() for model in models]] if len(rest) > 1 else []
        hook(models, *states, rest[-1])


def _in_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a model's results in fp32, as Accelerate does."""
    return convert_to_fp32(output)


PURE_HOOKS.add(_in_fp32)
