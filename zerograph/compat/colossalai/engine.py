"""ColossalAI's engine: a loop that looks eager, run as one graph per step."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.compat.colossalai.deferred import Deferred, Made, deferred_in
from zerograph.compat.colossalai.gradients import Reader
from zerograph.compat.colossalai.graphs import Forward, Gradients, Preview, Recorded, Step
from zerograph.compat.colossalai.metadata import Knowledge
from zerograph.compat.colossalai.program import Program, Texts, program_of
from zerograph.compat.colossalai.tape import Numbers, Tape
from zerograph.config import Config
from zerograph.errors import CaptureError, ConfigError, InputError
from zerograph.optim.step_hooks import Guard

# So often backward() without a step is more likely a step that was forgotten.
_MANY = 64


class Engine:
    """What ``colossalai.initialize()`` returns: model, criterion and optimizer as one training step.

    In training ``engine(x)`` computes nothing: it returns tensors that remember what is done to them, and
    ``engine.step()`` computes all of it, backward and the update as one graph. They have their values then; who asks
    for a value before gets the right one, at the cost of a forward more.

    Attributes:
        training: whether :meth:`train` or :meth:`eval` was called last.
        graph: the :class:`zerograph.ZeroGraph` that runs the steps, to be printed and inspected.
    """

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
        if optimizer is None:
            config = Config()
            configure(config)
            self.graph: Recorded = Forward(model, criterion, config)
        else:
            self.graph = Step(model, criterion, optimizer)
            configure(self.graph.config)
            self._preview, self._preview_of_update = (
                Preview(self.graph, criterion, whole=one) for one in (False, True)
            )
            self._graph_of_gradients = Gradients(self.graph, criterion)
            optimizer.register_step_pre_hook(Guard(functools.partial(_refuse_by_hand, optimizer)))
        config = self.graph.config
        if config.gradient_accumulation_steps > 1:
            config.accumulation_outputs = "packed"
        self._forward = self.graph if optimizer is None else Forward(model, criterion, config)
        self._texts = Texts({id(model): "model"} | ({} if criterion is None else {id(criterion): "criterion"}))
        # A forward has no micro-batches: its batch has fewer parts.
        self._known, self._known_at_once = (
            Knowledge(self.graph._members, parts, lambda: config.amp_dtype, self._warn)
            for parts in (self._parts, self.graph.parts)
        )
        self._numbers = Numbers()
        self._tape = self._new_tape()
        self._pending: list[Tape] = []
        self._warned: set[str] = set()
        self._backwards = 0
        self._reader = Reader(self)
        # The losses that the gradients were read for, and these.
        self._read_gradients: tuple[list[Made], Mapping[nn.Parameter, Tensor]] = ([], {})
        self._stepped = False

    @property
    def model(self) -> nn.Module:
        """The model as it was given; its parameters may be split."""
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
        """Set evaluation mode: ``engine(x)`` computes at once, from the newest parameters."""
        self.train(False)

    def zero_grad(self) -> None:
        """Take back each :meth:`backward` since the last update, but those of an accumulation's earlier calls."""
        self._tape.losses.clear()
        self._stepped = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's part of the batch; results are nested as the model returns them.

        Plain tensors are split between the ranks along dimension 0. In training the tensors returned are deferred; in
        evaluation, under ``torch.no_grad()`` and without an optimizer they are this rank's part, computed at once.

        Raises:
            ZeroGraphError: the model cannot be part of a graph.
        """
        if not self._defers:
            return self._at_once(self._model, args, kwargs)
        if not self._tape.losses and next(self._tape.alive(), None) is None:
            # Nobody can go on from what was computed before, nor see it.
            self._tape = self._new_tape()
        return self._tape.call(self._model, args, kwargs, module=True, parts=True)

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the criterion to the engine's results and this rank's labels; the loss is the whole batch's.

        Raises:
            ConfigError: the engine has none.
        """
        if self._criterion is None:
            raise ConfigError("the engine has no criterion: give one to initialize(), or let the model return its loss")
        given = next(deferred_in((args, kwargs)), None)
        if given is None:
            return self._at_once(self._criterion, args, kwargs)
        return self._tape.call(self._criterion, args, kwargs, module=True, parts=True)

    def backward(self, loss: Tensor) -> None:
        """Let :meth:`step` go backward from this loss, too: of several the gradients add up.

        Raises:
            InputError: not a scalar that the engine's model, in training, was part of.
        """
        if self._optimizer is None:
            raise ConfigError("the engine has no optimizer: give one to initialize(), or name one in the configuration")
        if not isinstance(loss, Deferred) or loss.tape is not self._tape or self._tape.closed:
            raise InputError(
                f"engine.backward() was called with {_shown(loss)}, which does not come from engine(...) since the "
                "last engine.step()\nIn training (engine.train(), not under torch.no_grad()), compute the loss from "
                "what engine(...) returns; loss.item() and float(loss) are plain numbers."
            )
        if loss.numel() != 1 or not loss.requires_grad:
            raise InputError(
                f"engine.backward() was called with {_shown(loss)}"
                f"{', which needs no gradient' if loss.numel() == 1 else ''}\n"
                "It takes a scalar that depends on trained parameters: take the mean or sum, and do not detach it."
            )
        if loss.made in self._tape.losses:
            raise InputError("engine.backward() was called twice with one loss: multiply it by 2 if that is meant")
        if not self._tape.losses:
            self._reader.watch(list(self.graph._adopted().parameters.values()))
        self._tape.losses.append(loss.made)
        self._backwards += 1
        if self._backwards == _MANY:
            self._warn(
                f"engine.backward() was called {_MANY} times without engine.step(): all that is computed until then is "
                "one step, and its tape grows\nCall engine.step() once for each batch; to add gradients of several "
                "batches up, set gradient_accumulation = k."
            )

    def step(self) -> bool:
        """Make the step: forward, backward and update as one graph. With accumulation, on each k-th call.

        Returns:
            Whether parameters were updated: not before an accumulation's last call, nor where a gradient overflowed
            under a loss scale.

        Raises:
            InputError: no :meth:`backward` since the last step.
            ZeroGraphError: on every rank, before any state changes.
        """
        if not isinstance(self.graph, Step):
            raise ConfigError("the engine has no optimizer: give one to initialize(), or name one in the configuration")
        if not self._tape.losses:
            raise InputError("engine.step() without engine.backward(loss) before: there is nothing to go down")
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
        """Everything to go on from, in whole tensors; see :meth:`zerograph.ZeroGraph.state_dict`. A collective.

        In the middle of an accumulation it is the state of the last update, with a warning: the calls since then are no
        part of it.
        """
        if self._pending:
            self._warn(
                f"state_dict() after {len(self._pending)} of the {self.graph.config.gradient_accumulation_steps} calls "
                "that make one update is the state of the last update: these calls are no part of it"
            )
        return self.graph.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, on any number of ranks and at any level. A collective.

        Raises:
            InputError: in the middle of an accumulation.
            ConfigError: the state does not fit; nothing is changed then.
        """
        self._check_between_updates("load_state_dict()")
        self.graph.load_state_dict(state)

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Unshard the model for eager use; see :meth:`zerograph.ZeroGraph.full_parameters`."""
        with self.graph.full_parameters():
            yield

    def gradients(self) -> Mapping[nn.Parameter, Tensor] | None:
        """Compute the gradients of all :meth:`backward` since the last update, of the whole batch. A collective.

        They are what the update will use, before clipping, and equal on all ranks; ``parameter.grad`` returns them.
        None without :meth:`backward`.

        Raises:
            InputError: with gradient accumulation before the last call, or the calls do not do the same.
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
                "With gradient accumulation they are one graph, and so is their gradient: read it after the last "
                "engine.backward(), before the last engine.step()."
            )
        losses, gradients = self._read_gradients
        if losses != self._tape.losses:
            self._hint(
                "a gradient was read before engine.step() has computed it, which takes a forward and a backward of "
                "their own, and holds whole gradients on each rank until engine.step()"
            )
            programs = [program_of(tape, tape.losses, [], self._texts) for tape in tapes]
            calls_of = [program.tensors for program in programs]
            named = self._graph_of_gradients.of(programs[0], calls_of, _unlike(programs))
            parameters = self.graph._members().parameters
            gradients = {parameters[name]: gradient for name, gradient in named.items()}
            self._read_gradients = list(self._tape.losses), gradients
        return gradients

    def waits_for_step(self) -> bool:
        """Return whether a :meth:`backward` since the last update still counts."""
        return bool(self._tape.losses or self._pending)

    def zeroed_by(self, owner: object) -> bool:
        """Call :meth:`zero_grad` for the ``zero_grad()`` of the engine's optimizer or model.

        Returns:
            Whether ``owner`` is one of them.
        """
        if owner is not self._optimizer and owner is not self._model:
            return False
        self.zero_grad()
        return True

    def warn_of_reading_late(self) -> None:
        """Warn, once, of a gradient that is read after the step has used it up."""
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

    def _new_tape(self, known: Knowledge | None = None) -> Tape:
        return Tape(known or self._known, self._name, self._read, self._numbers)

    def _name(self, parameter: nn.Parameter) -> str | None:
        return self.graph._members().names().get(id(parameter))

    def _at_once(self, function: Any, args: Any, kwargs: Any) -> Any:
        tape = self._new_tape(self._known_at_once)
        result = tape.call(function, args, kwargs, module=True, parts=True)
        leaves, tree = pytree.tree_flatten(result)
        made = [one for one in leaves if isinstance(one, Deferred)]
        program = program_of(tape, [], [one.made for one in made], self._texts)
        (values,) = self._forward.run(program, [program.tensors])
        found = iter(values)
        return pytree.tree_unflatten([next(found) if isinstance(one, Deferred) else one for one in leaves], tree)

    def _make(self, graph: Step, tapes: Sequence[Tape]) -> None:
        """Run the step that the tapes amount to, one for each call, and give what somebody holds of them its values."""
        wanted = _agreed(graph, tapes)
        programs = [program_of(*one, self._texts) for one in zip(tapes, [t.losses for t in tapes], wanted, strict=True)]
        values = graph.run(programs[0], [program.tensors for program in programs], _unlike(programs))
        for tape, made, found in zip(tapes, wanted, values, strict=True):
            tape.finish(dict(zip(made, found, strict=True)))

    def _read(self, tape: Tape, wanted: Sequence[Made]) -> list[Tensor]:
        """Compute values before the step does; they equal the step's."""
        calls = self.graph.config.gradient_accumulation_steps
        program = program_of(tape, [], wanted, self._texts)
        self._hint(
            "a value was asked for before engine.step() has computed it, which takes a forward of its own; "
            "after engine.step() it is there at no cost"
        )
        if calls == 1 or not program.draws:
            return self._preview.run(program, [program.tensors])[0]
        # Random numbers depend on the place in the whole update: it is filled up with copies of this call.
        place = next((n for n, one in enumerate(self._pending) if one is tape), len(self._pending))
        return self._preview_of_update.run(program, [program.tensors] * calls)[place]

    def _check_between_updates(self, what: str) -> None:
        if self._pending:
            raise InputError(
                f"{what} after {len(self._pending)} of the {self.graph.config.gradient_accumulation_steps} calls that "
                "make one update, which are no part of the state: call it after the last"
            )

    def _hint(self, message: str) -> None:
        """Warn of a cost in time that changes no number."""
        if self._verbose:
            self._warn(message)

    def _warn(self, message: str) -> None:
        if message not in self._warned and self.graph._join().rank == 0:
            self._warned.add(message)
            warnings.warn(message, stacklevel=source.levels_to_user())


def _refuse_by_hand(optimizer: torch.optim.Optimizer) -> None:
    raise CaptureError(f"{type(optimizer).__name__}.step() was called by hand: engine.step() makes the update")


def _shown(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:60]


def _unlike(programs: Sequence[Program]) -> InputError | None:
    """Return an error if the calls of an update do not do the same, else None."""
    for number, program in enumerate(programs):
        if program.text != programs[0].text:
            return InputError(
                f"with gradient accumulation all calls of an update must do the same; call 1 does\n"
                f"  {programs[0].text}\nand call {number + 1}\n  {program.text}\nin another way, on tensors of "
                "other shapes, or with other numbers. Leave the last, smaller batch out (drop_last=True)."
            )
    return None


def _agreed(graph: Step, tapes: Sequence[Tape]) -> list[list[Made]]:
    """Return the step's outputs for each call: those that any rank needs."""
    if not _alike(tapes):
        # A forward that nobody can reach any more, and that waits for the garbage collector, is no call of its own.
        gc.collect()
    wanted = _wanted_of_all(tapes)
    if graph.everybodys(_from_the_end(tapes, wanted)) is None:
        return wanted
    # What nobody can reach any more may wait for the garbage collector on one rank, and be gone on another.
    gc.collect()
    wanted = _wanted_of_all(tapes)
    for other in graph.everybodys(_from_the_end(tapes, wanted)) or ():
        for tape, mine, theirs in zip(tapes, wanted, other, strict=False):
            made = {Made(len(tape.calls) - call, leaf) for call, leaf in theirs}
            mine[:] = sorted({*mine, *filter(tape.has, made)})
    return wanted


def _from_the_end(tapes: Sequence[Tape], wanted: Sequence[Sequence[Made]]) -> list[list[tuple[int, int]]]:
    """Count calls from the end, so that ranks with earlier calls on their tapes agree on the numbers."""
    return [[(len(tape.calls) - one.call, one.leaf) for one in made] for tape, made in zip(tapes, wanted, strict=True)]


def _wanted_of_all(tapes: Sequence[Tape]) -> list[list[Made]]:
    wanted = [_wanted(tape) for tape in tapes]
    if not _alike(tapes):
        return wanted
    # What was let go of in one call may be held of another.
    return [sorted(set().union(*wanted)) for _ in tapes]


def _alike(tapes: Sequence[Tape]) -> bool:
    """Return whether the same functions were called on each tape."""
    return len({tuple(call.function for call in tape.calls) for tape in tapes}) == 1


def _wanted(tape: Tape) -> list[Made]:
    """Return the step's outputs: tensors still referenced, except those read already that lead to no loss.

    So a number that is looked at now and then makes no other step of those in which it is.
    """
    to_losses = set(tape.with_ancestors(one.call for one in tape.losses))
    return sorted({one.made for one in tape.alive() if one.known is None or one.made.call in to_losses})
