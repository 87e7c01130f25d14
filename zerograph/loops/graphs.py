"""The graphs of a loop: steps, forwards, and previews of values and gradients before the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from zerograph import _torch
from zerograph.compiler.dependencies import RECORDED
from zerograph.compiler.input_layout import rows_on
from zerograph.config import Config
from zerograph.errors import InputError, RankMismatchError
from zerograph.graph import ZeroGraph
from zerograph.ir.annotate import is_replicated, replicated
from zerograph.ir.mesh import piece_count
from zerograph.ir.sbp import NdSbp, Split, broadcast
from zerograph.loops.deferred import Meta
from zerograph.loops.program import Program
from zerograph.loops.words import Words
from zerograph.runtime.job.differences import first_difference
from zerograph.runtime.job.exchange import gather_whole
from zerograph.runtime.job.process_group import agree, differing, digest, mesh, mesh_of

T = TypeVar("T")

# Ranks compare tensors of at most this many elements before each step; larger ones are assumed to be equal.
_FEW = 4096
_ADVICE = "(what is computed from this rank's part must be computed in the step: by the model or the criterion)"

# Advice by a part of the message that ranks differ.
_DIFFERENT = (
    ("local shape", "Parts of the batch must be equal: drop_last=True leaves out the last, smaller batch."),
    (
        "nesting of the inputs",
        "Some ranks pass the model a tensor that others leave out, such as images: draw batches so that each rank has "
        "one, or none has.",
    ),
)
# The name under which ranks compare the outputs of a step.
_OUTPUTS = "what the step returns"


def _early(words: Words) -> str:
    return f"A value that is asked for before {words.step}, which all ranks must ask for or none, is a call of its own."


def _early_gradient(words: Words) -> str:
    return (
        f"A gradient that is read before {words.step}, which all ranks must read or none, is computed by a call of its "
        "own."
    )


class Recorded(ZeroGraph):
    """A graph whose ``build()`` is a recorded program.

    Attributes:
        tape: the program's text. Another text is another step.
    """

    purpose = ""

    def __init__(self, modules: Mapping[str, nn.Module], words: Words) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._recorded_modules, self._words = dict(modules), words
        self.tape = ""
        self._program: Program | None = None

    def build(self, *tensors: Tensor) -> Any:
        """Run the program, and ``backward()`` from its losses if it has any."""
        return self._computed(*tensors)

    def _computed(self, *tensors: Tensor) -> Any:
        assert self._program is not None
        losses, outputs = self._program.run(tensors, lambda name: _at(self, name))
        if losses:
            torch.autograd.backward(losses)
        return outputs

    def _attributes_of_code(self) -> dict[str, Any]:
        """Return what a trace of the graph depends on: the program, in place of the attributes that hold it."""
        program = {} if self._program is None else {RECORDED: self._program.described()}
        return {**self._attributes(), **program}

    def parts(self) -> int:
        """Return the number of parts that the batch of one call is split into over the ranks."""
        job = self._join()
        return piece_count(rows_on(self.config, job.mesh), job.mesh)

    def outputs_of_all_ranks(self, outputs: list[list[tuple[int, int]]]) -> list[list[list[tuple[int, int]]]] | None:
        """Return the outputs that each rank needs of each call, or None if all ranks agree. A collective.

        Args:
            outputs: for each call, the call's number and the leaf's number of each output that this rank needs.

        Raises:
            RankMismatchError: another rank is not about to run a step.
        """
        own_facts = {_OUTPUTS: json.dumps(outputs)}
        facts = differing(self._join(), self._doing(), digest(outputs), lambda: own_facts)
        if facts is None:
            return None
        if not all(_OUTPUTS in of_rank for of_rank in facts):
            raise RankMismatchError(f"{first_difference(facts, self._doing())} {_early(self._words)}")
        return [
            [[(call, leaf) for call, leaf in results] for results in json.loads(of_rank[_OUTPUTS])] for of_rank in facts
        ]

    def run(
        self, program: Program, calls: Sequence[Sequence[Tensor]], problem: Exception | None = None
    ) -> list[list[Tensor]]:
        """Run the program on the tensors of one or more calls of a forward.

        Args:
            program: the recorded program.
            calls: the tensors of each call.
            problem: the reason why this rank cannot run; then no rank runs.

        Returns:
            The outputs for each call.

        Raises:
            InputError: whole tensors differ between the calls.
            RankMismatchError: whole tensors differ between ranks, or another rank has a problem.
            ZeroGraphError: as calling a graph does.
        """
        values = self.results(program, calls, problem)
        assert self._latest is not None
        placed = zip(values, self._latest.outputs, program.metas, strict=True)
        columns = [self._parted(value, sbp, meta, len(calls)) for value, (sbp, _), meta in placed]
        return [[column[number] for column in columns] for number in range(len(calls))]

    def results(
        self, program: Program, calls: Sequence[Sequence[Tensor]], problem: Exception | None = None
    ) -> list[Tensor]:
        """Run the program as :meth:`run` does; return this rank's part of each output as the graph places it."""
        return local_parts(self._with_inputs(self, program, calls, problem))

    def _with_inputs(
        self,
        use: Callable[..., T],
        program: Program,
        calls: Sequence[Sequence[Tensor]],
        problem: Exception | None = None,
    ) -> T:
        """Make this program the graph's, and return what a function returns for the program's inputs."""
        self._program, text = program, f"{self.purpose}{program.text}"
        self._request = replace(self._request, early_outputs=program.early)
        if text != self.tape:
            # An equal text must stay the same object: a call is compared with the last one object by object.
            self.tape = text
        try:
            self._check_alike(program, calls, problem)
            inputs = [
                self._input([call[number] for call in calls], whole=kind == "whole")
                for number, kind in enumerate(program.kinds)
            ]
            return use(*inputs)
        except RankMismatchError as error:
            advice = next((advice for part, advice in _DIFFERENT if part in str(error)), None) or self._advice()
            raise RankMismatchError(f"{error} {advice}".strip()) from None

    def _check_alike(self, program: Program, calls: Sequence[Sequence[Tensor]], problem: Exception | None) -> None:
        """Raise unless all ranks have the same whole tensors: else a count of this rank's part would go unnoticed.

        All calls must have the same whole tensors, so those of one call are compared.
        """
        whole = [number for number, kind in enumerate(program.kinds) if kind == "whole"]
        differing = next((n for n in whole if problem is None and not _same([call[n] for call in calls])), None)
        if differing is not None:
            problem = InputError(
                f"a tensor of shape {tuple(calls[0][differing].shape)} that is not part of the batch differs between "
                "the calls that make one update\nWith gradient accumulation such tensors must be the "
                "same in all."
            )
        small = [(tuple(calls[0][n].shape), calls[0][n].tolist()) for n in whole if calls[0][n].numel() <= _FEW]
        # Different calls may be a problem of one rank alone.
        if not small and problem is None and len(calls) == 1:
            return
        shown = {f"a tensor of shape {shape} that is no part of the batch": f"{v} " + _ADVICE for shape, v in small}
        agree(self._join(), self._doing(), digest(small), lambda: shown, problem)

    def _advice(self) -> str:
        """Return advice for ranks that differ."""
        return ""

    def _input(self, tensors: Sequence[Tensor], *, whole: bool) -> Tensor:
        first = tensors[0].detach()
        if not whole:
            return first if len(tensors) == 1 else torch.cat([tensor.detach() for tensor in tensors])
        if first.dim() == 0:
            return first
        # Ranks compare the values of these.
        if is_replicated(tensors[0]):
            return replicated(first)
        placement, job = self.config.placement, self._join()
        if placement is None:
            kind = first.device.type
            placement = mesh(kind) if job.mesh.dims == 1 else mesh_of(kind, torch.tensor(job.grid, device="cpu"))
        return DTensor.from_local(first, placement, [Replicate()] * placement.ndim, run_check=False)

    def _parted(self, value: Tensor, sbp: NdSbp, meta: Meta, calls: int) -> list[Tensor]:
        """Return this rank's part of an output, for each call."""
        if calls == 1:
            return [self._part(value, sbp, meta)]
        if value.dim() == len(meta.shape):
            # Result once for all of them.
            return [self._part(value, sbp, meta)] * calls
        unbound = tuple(Split(s.dim - 1) if isinstance(s, Split) else s for s in sbp)
        return [self._part(entry, unbound, meta) for entry in value.unbind(0)]

    def _part(self, value: Tensor, sbp: NdSbp, meta: Meta) -> Tensor:
        if tuple(value.shape) == meta.shape:
            return value
        job = self._join()
        whole, dim = gather_whole(job, value, sbp), meta.batch_dim
        for along, batch_sbp in enumerate(rows_on(self.config, job.mesh)):
            if dim is not None and batch_sbp != broadcast:
                whole = whole.chunk(job.mesh.shape[along], dim)[job.mesh.position[along]]
        if tuple(whole.shape) != meta.shape:
            raise InputError(
                f"a result has the shape {tuple(whole.shape)} in the step, and had {meta.shape} on this rank before"
            )
        return whole


class Step(Recorded):
    """Whole training steps."""

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], words: Words
    ) -> None:
        super().__init__(modules, words)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)


class Forward(Recorded):
    """Forward passes, under the options of the steps."""

    def __init__(self, modules: Mapping[str, nn.Module], config: Config, words: Words) -> None:
        super().__init__(modules, words)
        self.config = config


class Preview(Forward):
    """Values that a step will compute, with its random numbers and without changes to buffers.

    Args:
        step: the graph of the step.
        whole: run all calls of an update, not only one.
    """

    purpose = "a value asked for before the step: "

    def __init__(self, step: Step, *, whole: bool) -> None:
        super().__init__(step._recorded_modules, step.config, step._words)
        self._step = step
        self._request = replace(self._request, accumulates=whole)

    def build(self, *tensors: Tensor) -> Any:
        """Run the step's program on copies of the buffers."""
        buffers = {
            f"{name}.{path}": buffer.clone()
            for name, module in self._members().root.named_children()
            for path, buffer in module.named_buffers(remove_duplicate=False)
        }
        with _torch.with_tensors(self._members().root, buffers):
            return super().build(*tensors)

    def _seed_of_step(self) -> int:
        if self._step._seed is None:
            self._step._seed = self._seed
        return self._step._seed_of_step()

    def _doing(self) -> str:
        return f"computing a value that was asked for before {self._words.step}"

    def _advice(self) -> str:
        return _early(self._words)


class Gradients(Preview):
    """The gradients that a step will compute, before clipping."""

    purpose = "gradients read before the step: "

    def __init__(self, step: Step) -> None:
        super().__init__(step, whole=True)
        # By the program's text: names of the parameters that get a gradient.
        self._names: dict[str, tuple[str, ...]] = {}

    def of(self, program: Program, calls: Sequence[Sequence[Tensor]], problem: Exception | None) -> dict[str, Tensor]:
        """Compute the gradient of the program's losses over the whole batch, by the parameter's name. A collective.

        Args:
            program: the recorded program.
            calls: the tensors of each call that makes the update.
            problem: the reason why this rank cannot run; then no rank runs.

        Raises:
            RankMismatchError: another rank does not read gradients now.
            ZeroGraphError: as calling a graph does.
        """
        scaler = self.config.scaler
        device = next(iter(self._members().parameters.values())).device
        scale = torch.ones((), device=device) if scaler is None else scaler.tensors(device)["scale"].clone()
        program = replace(program, tensors=(*program.tensors, scale), kinds=(*program.kinds, "whole"))
        # There is one gradient of all micro-batches, not one of each.
        self.config = replace(self._step.config, accumulation_outputs="whole")
        values = self.results(program, [[*tensors, scale] for tensors in calls], problem)
        assert self._latest is not None
        job = self._join()
        placed = zip(self._names[self.tape], values, self._latest.outputs, strict=True)
        return {name: gather_whole(job, value, sbp) for name, value, (sbp, _) in placed}

    def _attributes_of_code(self) -> dict[str, Any]:
        """Return attributes without the program: a trace notes the names of gradients, so no step is cached."""
        return self._attributes()

    def _computed(self, *tensors: Tensor) -> Any:
        assert self._program is not None
        *inputs, scale = tensors
        losses, _ = self._program.run(inputs, lambda name: _at(self, name))
        # Scaled as in the step, so that small gradients do not underflow in fp16.
        if losses:
            torch.autograd.backward(losses, [scale.to(loss.dtype).expand(loss.shape) for loss in losses])
        inverse = scale.double().reciprocal().float()
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._members().parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad if self.config.scaler is None else parameter.grad * inverse
                parameter.grad = None
        self._names[self.tape] = tuple(gradients)
        return list(gradients.values())

    def _doing(self) -> str:
        return f"computing gradients that were read before {self._words.step}"

    def _advice(self) -> str:
        return _early_gradient(self._words)


def local_parts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of each output of a graph."""
    return [output.to_local() if isinstance(output, DTensor) else output for output in outputs]


def _same(tensors: Sequence[Tensor]) -> bool:
    return all(tensor is tensors[0] or torch.equal(tensor, tensors[0]) for tensor in tensors[1:])


def _at(graph: Recorded, name: str) -> Tensor:
    module, _, path = name.partition(".")
    parameter: Tensor = getattr(graph, module).get_parameter(path)
    return parameter
