"""ColossalAI's engine: a loop that looks eager, run as one graph per step."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError, InputError, ZeroGraphWarning
from zerograph.loops.deferred import Deferred, Result, deferred_in
from zerograph.loops.gradients import Reader, refuse_clearing_some, refuse_writing
from zerograph.loops.graphs import Forward, Gradients, Preview, Recorded, Step
from zerograph.loops.metadata import Outcomes
from zerograph.loops.outputs import agreed_outputs
from zerograph.loops.program import Program, Texts, program_of
from zerograph.loops.tape import Numbers, Tape, check_scalar_loss
from zerograph.loops.words import Words
from zerograph.optim.step_hooks import Guard

WORDS = Words(
    model="the engine",
    call="engine(...)",
    criterion="engine.criterion(output, y, mask),",
    backward="engine.backward(loss)",
    step="engine.step()",
    zero_grad="engine.zero_grad()",
    precision="The step computes as its configuration says: zero means fp16, bf16 = True bf16, fp16 = False fp32.",
    clip="the configuration (clip_grad in zero, clip_grad_norm without)",
)

# Calls of backward() without step() after which a warning says that step() was probably forgotten.
_MANY = 64


class Engine:
    """Model, criterion and optimizer as one training step, as ``colossalai.initialize()`` returns it.

    In training ``engine(x)`` computes nothing: it returns deferred tensors that record operators on them, and
    ``engine.step()`` computes forward, backward and update as one graph. Then the deferred tensors have their values.
    Reading a value before the step costs an extra forward.

    Attributes:
        words: the names of the calls in messages.
        training: whether :meth:`train` or :meth:`eval` was called last.
        graph: the :class:`zerograph.ZeroGraph` that runs the steps; print it, or inspect it.
    """

    words = WORDS

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Callable[..., Any] | None,
        configure: Callable[[Any], None],
        *,
        verbose: bool = True,
    ) -> None:
        self._model, self._optimizer, self._criterion, self._verbose = model, optimizer, criterion, verbose
        self.training = model.training
        modules = {"model": model} | ({"criterion": criterion} if isinstance(criterion, nn.Module) else {})
        if optimizer is None:
            config = Config()
            configure(config)
            self.graph: Recorded = Forward(modules, config, WORDS)
        else:
            self.graph = Step(modules, [optimizer], WORDS)
            configure(self.graph.config)
            self._preview, self._preview_of_update = (Preview(self.graph, whole=whole) for whole in (False, True))
            self._graph_of_gradients = Gradients(self.graph)
            optimizer.register_step_pre_hook(Guard(functools.partial(_refuse_by_hand, optimizer)))
        config = self.graph.config
        if config.gradient_accumulation_steps > 1:
            config.accumulation_outputs = "packed"
        self._forward = self.graph if optimizer is None else Forward(modules, config, WORDS)
        self._texts = Texts({id(model): "model"} | ({} if criterion is None else {id(criterion): "criterion"}))
        # A forward has no micro-batches: its batch has fewer parts.
        self._outcomes, self._outcomes_at_once = (
            Outcomes(self.graph._members, parts, lambda: config.amp_dtype, self._warn)
            for parts in (self._parts, self.graph.parts)
        )
        self._numbers = Numbers()
        self._tape = self._new_tape()
        self._pending: list[Tape] = []
        self._warned: set[str] = set()
        self._backwards = 0
        self._reader = Reader(self)
        # The losses whose gradients were read, and these gradients.
        self._read_gradients: tuple[list[Result], Mapping[nn.Parameter, Tensor]] = ([], {})
        self._stepped = False

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
        """Set evaluation mode: ``engine(x)`` computes at once, with the current parameters."""
        self.train(False)

    def zero_grad(self) -> None:
        """Undo each :meth:`backward` since the last call of :meth:`step`."""
        self._tape.losses.clear()
        self._stepped = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's part of the batch.

        Plain tensors are this rank's part along dimension 0. Results are nested as the model returns them. In training
        they are deferred tensors. In evaluation, under ``torch.no_grad()`` and without an optimizer they are computed
        at once.

        Raises:
            ZeroGraphError: the model cannot be part of a graph.
        """
        if not self._defers:
            return self._at_once(self._model, args, kwargs)
        if not self._tape.losses and next(self._tape.alive(), None) is None:
            # No earlier result is referenced, so the earlier calls cannot be part of the step.
            self._tape = self._new_tape()
        return self._tape.call(self._model, args, kwargs, module=True, parts=True)

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the criterion to the engine's results and this rank's labels; the loss is that of the whole batch.

        Raises:
            ConfigError: the engine has no criterion.
        """
        if self._criterion is None:
            raise ConfigError("the engine has no criterion: give one to initialize(), or let the model return its loss")
        if next(deferred_in((args, kwargs)), None) is None:
            return self._at_once(self._criterion, args, kwargs)
        return self._tape.call(self._criterion, args, kwargs, module=True, parts=True)

    def backward(self, loss: Tensor) -> None:
        """Make :meth:`step` run backward from this loss. Gradients of several losses add up.

        Raises:
            ConfigError: the engine has no optimizer.
            InputError: the loss is not a scalar, or was not computed from the engine's results in training.
        """
        if self._optimizer is None:
            raise ConfigError("the engine has no optimizer: give one to initialize(), or name one in the configuration")
        if not isinstance(loss, Deferred) or loss.tape is not self._tape or self._tape.closed:
            raise InputError(
                f"engine.backward() was called with {_shown(loss)}, which does not come from engine(...) since the "
                "last engine.step()\nIn training (engine.train(), not under torch.no_grad()), compute the loss from "
                "what engine(...) returns; loss.item() and float(loss) are plain numbers."
            )
        check_scalar_loss(loss, f"engine.backward() was called with {_shown(loss)}")
        if loss.result in self._tape.losses:
            raise InputError("engine.backward() was called twice with one loss: multiply it by 2 if that is intended")
        if not self._tape.losses:
            self._reader.watch(list(self.graph._adopted().parameters.values()))
        self._tape.losses.append(loss.result)
        self._backwards += 1
        if self._backwards == _MANY:
            self._warn(
                f"engine.backward() was called {_MANY} times without engine.step(): all calls until then are one step, "
                "and its tape grows\nCall engine.step() once for each batch; to accumulate gradients of several "
                "batches, set gradient_accumulation = k."
            )

    def step(self) -> bool:
        """Run forward, backward and update as one graph; with accumulation, at each k-th call.

        Returns:
            Whether parameters were updated: False before an accumulation's last call, and if a gradient overflowed
            under a loss scale.

        Raises:
            ConfigError: the engine has no optimizer.
            InputError: :meth:`backward` was not called since the last step.
            ZeroGraphError: on every rank, before any state changes.
        """
        if not isinstance(self.graph, Step):
            raise ConfigError("the engine has no optimizer: give one to initialize(), or name one in the configuration")
        if not self._tape.losses:
            raise InputError("engine.step() without engine.backward(loss) before: there is no loss to minimise")
        self._tape.closed, self._backwards = True, 0
        tapes = [*self._pending, self._tape]
        if len(tapes) < self.graph.config.gradient_accumulation_steps:
            self._pending, self._tape = tapes, self._new_tape()
            return False
        done = self.graph.steps_done
        try:
            self._make(self.graph, tapes)
        finally:
            self._pending, self._tape, self._stepped = [], self._new_tape(), True
            self._read_gradients = [], {}
        return self.graph.steps_done > done

    def state_dict(self) -> dict[str, Any]:
        """Return the training state in whole tensors; see :meth:`zerograph.ZeroGraph.state_dict`. A collective.

        In the middle of an accumulation this is the state of the last update, without the calls since then, and a
        warning says so.
        """
        if self._pending:
            self._warn(
                f"state_dict() after {len(self._pending)} of the {self.graph.config.gradient_accumulation_steps} calls "
                "that make one update is the state of the last update, without these calls"
            )
        return self.graph.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on any number of ranks and at any level. A collective.

        Raises:
            InputError: the call is in the middle of an accumulation.
            ConfigError: the state does not fit; nothing has changed then.
        """
        self._check_between_updates("load_state_dict()")
        self.graph.load_state_dict(state)

    @contextlib.contextmanager
    def full_parameters(self, *, modifier_rank: int | None = None) -> Iterator[None]:
        """Unshard the model for eager use; see :meth:`zerograph.ZeroGraph.full_parameters`."""
        with self.graph.full_parameters(modifier_rank=modifier_rank):
            yield

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter as :meth:`gradients` does."""
        return (self.gradients() or {}).get(parameter)

    def check_writable(self, what: str) -> None:
        """Raise a CaptureError: the update computes and uses gradients in one graph."""
        refuse_writing(what)

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Raise a CaptureError as :meth:`check_writable` does."""
        refuse_writing("parameter.grad is set")

    def discarded(self, parameter: nn.Parameter) -> None:
        """Ignore a gradient that is set to None after the update."""

    def gradients(self) -> Mapping[nn.Parameter, Tensor] | None:
        """Compute the gradients of all losses since the last update, over the whole batch. A collective.

        The update will use these gradients, after clipping. They are equal on all ranks, and ``parameter.grad`` returns
        them.

        Returns:
            The gradients by parameter; None without :meth:`backward`.

        Raises:
            InputError: with gradient accumulation it is not the last call yet, or the calls differ.
        """
        if not self.waits_for_step():
            return None
        calls = self.graph.config.gradient_accumulation_steps
        tapes = [*self._pending, *([self._tape] if self._tape.losses else [])]
        if len(tapes) < calls:
            line, code = source.running_line()
            raise InputError(
                f"parameter.grad was read after {len(tapes)} of the {calls} calls that make one update\n"
                f"  {line}   {code}\n"
                "With gradient accumulation an update is one graph with one gradient: read it after the last "
                "engine.backward(), before the last engine.step()."
            )
        losses, gradients = self._read_gradients
        if losses != self._tape.losses:
            self._hint(
                "a gradient was read before engine.step() has computed it: this takes an extra forward and backward, "
                "and stores whole gradients on each rank until engine.step()"
            )
            programs = [program_of(tape, tape.losses, [], self._texts) for tape in tapes]
            calls_of = [program.tensors for program in programs]
            named = self._graph_of_gradients.of(programs[0], calls_of, _unlike(programs))
            parameters = self.graph._members().parameters
            gradients = {parameters[name]: gradient for name, gradient in named.items()}
            self._read_gradients = list(self._tape.losses), gradients
        return gradients

    def waits_for_step(self) -> bool:
        """Return whether there is a loss that no update has used yet."""
        return bool(self._tape.losses or self._pending)

    def zeroed_by(self, owner: object) -> bool:
        """Call :meth:`zero_grad` for the ``zero_grad()`` of the engine's optimizer or model.

        Raises:
            CaptureError: ``owner`` is another module or optimizer.
        """
        if owner is not self._optimizer and owner is not self._model:
            refuse_clearing_some()
        self.zero_grad()
        return True

    def warn_of_reading_late(self) -> None:
        """Warn once that a gradient was read after the step has used it."""
        if self._stepped:
            self._warn(
                "parameter.grad is None after engine.step(): gradients exist inside the step only\n"
                "Read it between engine.backward() and engine.step()."
            )

    def __repr__(self) -> str:
        return repr(self.graph)

    @property
    def _defers(self) -> bool:
        return self.training and self._optimizer is not None and torch.is_grad_enabled()

    def _parts(self) -> int:
        return self.graph.parts() * self.graph.config.gradient_accumulation_steps

    def _new_tape(self, outcomes: Outcomes | None = None) -> Tape:
        return Tape(outcomes or self._outcomes, self._name, self._read, self._numbers, words=WORDS)

    def _name(self, parameter: nn.Parameter) -> str | None:
        return self.graph._members().names().get(id(parameter))

    def _at_once(self, function: Any, args: Any, kwargs: Any) -> Any:
        tape = self._new_tape(self._outcomes_at_once)
        result = tape.call(function, args, kwargs, module=True, parts=True)
        leaves, tree = pytree.tree_flatten(result)
        deferred = [leaf for leaf in leaves if isinstance(leaf, Deferred)]
        program = program_of(tape, [], [tensor.result for tensor in deferred], self._texts)
        (values,) = self._forward.run(program, [program.tensors])
        rest = iter(values)
        return pytree.tree_unflatten([next(rest) if isinstance(leaf, Deferred) else leaf for leaf in leaves], tree)

    def _make(self, graph: Step, tapes: Sequence[Tape]) -> None:
        """Run the step that the tapes record, one tape for each call, and give deferred tensors their values."""
        outputs = agreed_outputs(graph, tapes)
        programs = [program_of(tape, tape.losses, out, self._texts) for tape, out in zip(tapes, outputs, strict=True)]
        values = graph.run(programs[0], [program.tensors for program in programs], _unlike(programs))
        for tape, results, computed in zip(tapes, outputs, values, strict=True):
            tape.finish(dict(zip(results, computed, strict=True)))

    def _read(self, tape: Tape, results: Sequence[Result]) -> list[Tensor]:
        """Compute values before the step; they equal the step's values."""
        calls = self.graph.config.gradient_accumulation_steps
        program = program_of(tape, [], results, self._texts)
        self._hint(
            "a value was read before engine.step() has computed it: this takes an extra forward; after engine.step() "
            "it costs nothing"
        )
        if calls == 1 or not program.draws:
            return self._preview.run(program, [program.tensors])[0]
        # Random numbers depend on the position in the whole update, so run an update of copies of this call.
        place = next((n for n, pending in enumerate(self._pending) if pending is tape), len(self._pending))
        return self._preview_of_update.run(program, [program.tensors] * calls)[place]

    def _check_between_updates(self, what: str) -> None:
        if self._pending:
            raise InputError(
                f"{what} after {len(self._pending)} of the {self.graph.config.gradient_accumulation_steps} calls that "
                "make one update, which are not part of the state: call it after the last"
            )

    def _hint(self, message: str) -> None:
        """Warn about extra time that changes no number."""
        if self._verbose:
            self._warn(message)

    def _warn(self, message: str) -> None:
        if message not in self._warned and self.graph._join().rank == 0:
            self._warned.add(message)
            warnings.warn(message, ZeroGraphWarning, stacklevel=source.levels_to_user())


def _refuse_by_hand(optimizer: torch.optim.Optimizer) -> None:
    raise CaptureError(f"{type(optimizer).__name__}.step() was called directly: engine.step() makes the update")


def _shown(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:60]


def _unlike(programs: Sequence[Program]) -> InputError | None:
    """Return an error if the calls of an update differ, else None."""
    for number, program in enumerate(programs):
        if program.text != programs[0].text:
            return InputError(
                f"with gradient accumulation all calls of an update must do the same; call 1 does\n"
                f"  {programs[0].text}\nand call {number + 1}\n  {program.text}\nin another way, on tensors of "
                "other shapes, or with other numbers. Leave out the last, smaller batch (drop_last=True)."
            )
    return None
