"""``sharded_init()``: models that are made split from the start, with the values that plain construction gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from zerograph import _torch
from zerograph.config import Config
from zerograph.errors import ConfigError, PlacementError
from zerograph.ir.buckets import Bucket, Slot
from zerograph.ir.sbp import NdSbp, Split, broadcast
from zerograph.runtime.job.exchange import broadcast_small
from zerograph.runtime.job.process_group import Job, agree, digest, join
from zerograph.runtime.parameters import hollow_out
from zerograph.runtime.relayout import create_provisional_store, split_part
from zerograph.runtime.state import store_of
from zerograph.state.construction.fingerprint import digest_of, fingerprint
from zerograph.state.construction.generators import Generators, default_generator
from zerograph.state.construction.program import Memory, Operation, Ref, ref, tensor_at
from zerograph.state.construction.recorder import Guard, Recorder, live_tensors
from zerograph.state.construction.replay import replay

_DOING = "making what sharded_init() has recorded"

# The recorder that is at work, if any.
_recording: list[Recorder] = []

# A parameter, the layout of its bucket, and this rank's part of that.
_Part = tuple[nn.Parameter, Bucket, Tensor]


@contextlib.contextmanager
def sharded_init(placement: DeviceMesh | None = None) -> Iterator[None]:
    """Make models inside whose parameters are split between the ranks from the start, and never whole on any.

    ``with zg.sharded_init(): model = Llama(config)`` gives ``model`` bitwise the values that it would have on one
    device, after ``torch.manual_seed`` with rank 0's seed: what the construction computes is recorded, and done at the
    end of the block, operator by operator, on every rank; each keeps its part of a parameter and drops the rest as soon
    as nothing needs it any more. No weights are sent. Random generators stand afterwards where plain construction would
    have left rank 0's. Memory: this rank's parts, and the few whole tensors that construction computes with at once.

    Every rank must make the same. The parameters are then as those of a graph between steps: they refuse to be computed
    with, optimizers can be built on them, and each graph takes them over when it compiles. Buffers and other tensors
    are whole on all ranks. Weights that the construction reads from files are whole while it lasts.

    Args:
        placement: of a grid of ranks, parameters are split along the last dimension and copied along the others. By
            default all ranks in a line, which splits most. A graph may use another.

    Raises:
        PlacementError: not a placement, or one that leaves ranks out.
        ConfigError: used inside itself or inside ``build()``; a lazy module; gradients made inside.
        CaptureError: the construction does what cannot be put off.
        RankMismatchError: ranks make different models, or another rank has failed.
        CommunicationError: another rank does not answer.
    """
    if _recording:
        raise ConfigError("sharded_init() inside of sharded_init(): one around all that is to be made split is enough")
    if torch.compiler.is_compiling():
        raise ConfigError("sharded_init() inside of build(): make the model before, and give it to the graph")
    if placement is not None and not isinstance(placement, DeviceMesh):
        raise PlacementError(
            f"sharded_init() takes a placement, as zg.placement('cpu', ranks=[0, 1]) makes one, not {placement!r:.60}"
        )
    job = join(Config().timeout, placement)
    with _torch.plain_tensors():
        # What is there already stays as it is.
        before = {id(one): one for one in live_tensors(collect=False) if isinstance(one, nn.Parameter)}
    recorder = Recorder(_first_ranks_generators(job))
    _recording.append(recorder)
    try:
        with recorder, Guard(recorder):
            yield
    except BaseException as error:
        _abandon(recorder)
        # The others wait for this rank at the end of the block.
        agree(job, _DOING, 0, dict, error)
        raise
    finally:
        _recording.clear()
    _finish(job, recorder, before)


def _first_ranks_generators(job: Job) -> Generators:
    """The generators that models are drawn from, as rank 0's stand: those that a user makes are as he made them."""
    found = Generators()
    found.number(torch.default_generator)
    if torch.cuda.is_available():
        # Also if the model is to be made on the CPU: that is known only later, when this rank cannot ask the others.
        found.number(default_generator(torch.device("cuda")))
    broadcast_small(job, [one.entry for one in found.watched], "random numbers")
    return found


def is_recording() -> bool:
    """Whether a model is being made inside :func:`sharded_init`: nothing in it has values yet."""
    return bool(_recording)


@dataclass(frozen=True, eq=False)
class _Made:
    """What is there at the end of the block.

    Attributes:
        parameters: in an order that is the same on all ranks, each with where it lies.
        whole: numbers of the memories whose bytes all ranks keep.
        views: tensors that share memory with a parameter, and lose it.
    """

    parameters: tuple[tuple[nn.Parameter, Ref], ...]
    whole: frozenset[int]
    views: tuple[Tensor, ...]


def _finish(job: Job, recorder: Recorder, before: Mapping[int, nn.Parameter]) -> None:
    """Do what was recorded. A collective; nothing changes unless all goes well on all ranks."""
    try:
        made = _agreed(job, recorder, before)
        parts, whole = _done(job, recorder, made)
    except BaseException:
        _abandon(recorder)
        raise
    with _torch.plain_tensors(), torch.no_grad():
        for number in list(whole):
            _fill(recorder.program.memories[number], whole.pop(number))
        for tensor in made.views:
            hollow_out(tensor)
    for parameter, layout, part in parts:
        create_provisional_store(job, layout, parameter, part)


def _agreed(job: Job, recorder: Recorder, before: Mapping[int, nn.Parameter]) -> _Made:
    """What all ranks have made alike."""
    problem: BaseException | None = None
    made = _Made((), frozenset(), ())
    lines: list[str] = []
    try:
        recorder.note_reseeds()
        with _torch.plain_tensors():
            made = _collected(recorder, before)
            entries = [one.entry for one in recorder.generators.watched]
            lines = fingerprint(recorder.program, entries, [at for _, at in made.parameters], sorted(made.whole))
    except BaseException as error:
        problem = error
    agree(job, _DOING, digest(lines), lambda: _numbered(lines), problem)
    return made


def _collected(recorder: Recorder, before: Mapping[int, nn.Parameter]) -> _Made:
    """What of all that was made somebody still holds.

    Raises:
        ConfigError: a lazy module, or a parameter with a gradient.
    """
    live = live_tensors()
    parameters = [
        one
        for one in live
        if isinstance(one, nn.Parameter) and id(one) not in before and not one.is_meta and store_of(one) is None
    ]
    if any(isinstance(one, UninitializedParameter) for one in parameters):
        raise ConfigError(
            "a lazy module made inside sharded_init() has parameters without a shape: there is nothing to split yet\n"
            "Give the module its sizes, or make it outside and run it once."
        )
    trained = next((one for one in parameters if one.grad is not None), None)
    if trained is not None:
        raise ConfigError(
            f"backward() inside sharded_init() gave a parameter of shape {tuple(trained.shape)} a gradient, which a "
            "split parameter cannot keep\nTrain in a graph, or give gradients up inside: model.zero_grad()."
        )
    # What numpy made and no operator has seen gets its number here, in an order that all ranks have.
    split = sorted((one for one in parameters if one.numel()), key=lambda one: _place(recorder, one))
    placed = tuple((one, ref(one, recorder.take_in(one))) for one in split)
    of_parameters = {at.memory for _, at in placed}
    memories = recorder.program.memories
    operations = [entry for entry in recorder.program.entries if isinstance(entry, Operation)]
    # What was there before and is written to.
    whole = {number for operation in operations for number in operation.writes if memories[number].outside}
    views = []
    known = set(map(id, split))
    for one in live:
        memory = None if one.is_meta or id(one) in known else recorder.memory_of(one)
        if memory is not None and not memory.outside:
            if memory.number in of_parameters:
                views.append(one)
            else:
                whole.add(memory.number)
    return _Made(placed, frozenset(whole), tuple(views))


def _place(recorder: Recorder, parameter: nn.Parameter) -> tuple[Any, ...]:
    memory = recorder.memory_of(parameter)
    shape = parameter.storage_offset(), tuple(parameter.shape), parameter.stride(), str(parameter.dtype)
    return (0, memory.number, *shape) if memory is not None else (1, digest_of(parameter.untyped_storage()), *shape)


def _done(job: Job, recorder: Recorder, made: _Made) -> tuple[list[_Part], dict[int, torch.UntypedStorage]]:
    """This rank's parts, and the bytes of what is whole by memory: all from rank 0's random numbers, on all ranks."""
    problem: BaseException | None = None
    parts: list[_Part] = []
    whole: dict[int, torch.UntypedStorage] = {}
    by_memory: dict[int, list[tuple[nn.Parameter, Ref]]] = {}
    for parameter, at in made.parameters:
        by_memory.setdefault(at.memory, []).append((parameter, at))

    def take(number: int, storage: torch.UntypedStorage) -> None:
        for parameter, at in by_memory.get(number, ()):
            layout = _layout(job, parameter)
            parts.append((parameter, layout, split_part(job, layout, tensor_at(at, storage))))
        if number in made.whole:
            whole[number] = storage

    try:
        with _torch.plain_tensors():
            replay(recorder.program, {*by_memory, *made.whole}, recorder.generators, take)
    except BaseException as error:
        problem = error
    agree(job, "keeping what sharded_init() has made", 0, dict, problem)
    return parts, whole


def _layout(job: Job, parameter: nn.Parameter) -> Bucket:
    """A bucket that the parameter has to itself."""
    mesh = job.mesh
    with _torch.plain_tensors():
        ranks, numel = mesh.shape[-1], parameter.numel()
        sbp: NdSbp = (*(broadcast for _ in mesh.shape[:-1]), Split(0))
        slot = Slot("parameter", tuple(parameter.shape), 0, numel)
        kind = parameter.dtype, parameter.device, sbp
    return Bucket("parameter", (slot,), numel, -(-numel // ranks) * ranks, *kind, None, ranks, mesh.dims - 1)


def _fill(memory: Memory, values: torch.UntypedStorage) -> None:
    if not memory.outside:
        memory.storage.resize_(memory.nbytes)
    memory.storage.copy_(values)


def _abandon(recorder: Recorder) -> None:
    """Leave nothing behind that looks like a model: what somebody still holds of it refuses to be used."""
    recorder.generators.restore()
    with _torch.plain_tensors(), torch.no_grad():
        for one in live_tensors():
            memory = None if one.is_meta else recorder.memory_of(one)
            if memory is not None and not memory.outside and one.numel():
                hollow_out(one)


def _numbered(lines: Sequence[str]) -> dict[str, str]:
    return {f"line {number} of what construction does": line for number, line in enumerate(lines)}
