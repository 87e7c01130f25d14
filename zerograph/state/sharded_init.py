"""Construct models that are sharded from the start, with the values of plain construction: ``sharded_init()``."""

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
from zerograph.ir.buckets import Bucket
from zerograph.runtime.job.exchange import broadcast_small
from zerograph.runtime.job.process_group import Job, agree, digest, join
from zerograph.runtime.parameters import hollow_out
from zerograph.runtime.relayout import create_provisional_store, provisional_layout, split_part
from zerograph.runtime.state import store_of
from zerograph.state.construction.fingerprint import digest_of, fingerprint
from zerograph.state.construction.generators import Generators, default_generator
from zerograph.state.construction.program import Memory, Operation, Ref, ref, tensor_at
from zerograph.state.construction.recorder import Guard, Recorder, live_tensors
from zerograph.state.construction.replay import replay

_DOING = "running the construction that sharded_init() has recorded"

# The active recorder, if any, and its ranks.
_recording: list[tuple[Recorder, Job]] = []

# A parameter, the layout of its bucket, and this rank's part of the bucket.
_Part = tuple[nn.Parameter, Bucket, Tensor]


@contextlib.contextmanager
def sharded_init(placement: DeviceMesh | None = None) -> Iterator[None]:
    """Construct models inside with parameters that are sharded from the start and never all whole on a rank.

    After ``with zg.sharded_init(): model = Llama(config)``, ``model`` has bitwise the values that it would have on one
    device, with rank 0's random state. The operators of the construction are recorded. At the end of the block every
    rank runs them one by one, keeps its part of each parameter, and frees the rest after its last use. No weights are
    sent. The default random generators end in the state that plain construction would leave on rank 0. Memory: this
    rank's parts, and the few whole tensors that the construction uses at a time.

    Every rank must construct the same model. Its parameters are then like those of a graph between steps: computing
    with them is an error, optimizers can be built on them, and a graph takes them over when it compiles. Buffers and
    other tensors are whole on all ranks. Weights that the construction reads from files are whole until its end.

    A block inside of another one, as in a function that constructs a part, is a part of the outer block.

    Args:
        placement: a mesh of all ranks. Parameters are split along its last dimension and replicated along the others.
            The default is one dimension, which splits most. A graph may use another placement.

    Raises:
        PlacementError: ``placement`` is not a placement, or leaves ranks out.
        ConfigError: it is used inside ``build()``, a module is lazy, or a parameter has a gradient.
        CaptureError: the construction does something that cannot be recorded.
        RankMismatchError: ranks construct different models, or another rank has failed.
        CommunicationError: another rank does not answer.
    """
    if _recording:
        # The outer block does all. Another placement is not what it would give.
        with _torch.plain_tensors():
            if placement is not None and join_for("sharded_init()", placement) is not _recording[0][1]:
                raise PlacementError("sharded_init() inside of sharded_init() has another placement: leave it out")
        yield
        return
    if torch.compiler.is_compiling():
        raise ConfigError("sharded_init() inside of build(): construct the model before, and give it to the graph")
    job = join_for("sharded_init()", placement)
    with _torch.plain_tensors():
        # Parameters that exist already are not sharded.
        before = {id(tensor): tensor for tensor in live_tensors(collect=False) if isinstance(tensor, nn.Parameter)}
    recorder = Recorder(_first_ranks_generators(job))
    _recording.append((recorder, job))
    try:
        with recorder, Guard(recorder):
            yield
    except BaseException as error:
        _abandon(recorder)
        # The other ranks wait for this one at the end of the block.
        agree(job, _DOING, 0, dict, error)
        raise
    finally:
        _recording.clear()
    _finish(job, recorder, before)


def join_for(call: str, placement: DeviceMesh | None) -> Job:
    """Return the job whose ranks a construction shards parameters over.

    Args:
        call: the name of the construction in messages.

    Raises:
        PlacementError: ``placement`` is not a placement, or leaves ranks out.
    """
    if placement is not None and not isinstance(placement, DeviceMesh):
        raise PlacementError(
            f"{call} takes a placement, such as zg.placement('cpu', ranks=[0, 1]), not {placement!r:.60}"
        )
    return join(Config().timeout, placement)


def _first_ranks_generators(job: Job) -> Generators:
    """Return the default generators with rank 0's states; generators that the user creates keep their own."""
    generators = Generators()
    generators.number(torch.default_generator)
    if torch.cuda.is_available():
        # Even if the model is constructed on the CPU: the device is known only later, without a collective there.
        generators.number(default_generator(torch.device("cuda")))
    broadcast_small(job, [watched.initial for watched in generators.watched], "random numbers")
    return generators


def is_recording() -> bool:
    """Return whether a :func:`sharded_init` block is active: tensors constructed in it have no values yet."""
    return bool(_recording)


@dataclass(frozen=True, eq=False)
class _Survivors:
    """Tensors of the construction that are alive at the end of the block.

    Attributes:
        parameters: parameters with their views of memory, in the same order on all ranks.
        whole: numbers of the memories that all ranks keep whole.
        views: tensors that share memory with a parameter; they become hollow.
    """

    parameters: tuple[tuple[nn.Parameter, Ref], ...]
    whole: frozenset[int]
    views: tuple[Tensor, ...]


def _finish(job: Job, recorder: Recorder, before: Mapping[int, nn.Parameter]) -> None:
    """Run the recorded program and fill the tensors, or change nothing if any rank fails. A collective."""
    try:
        survivors = _agreed_survivors(job, recorder, before)
        parts, whole = _replayed(job, recorder, survivors)
    except BaseException:
        _abandon(recorder)
        raise
    with _torch.plain_tensors(), torch.no_grad():
        for number in list(whole):
            _fill(recorder.program.memories[number], whole.pop(number))
        for tensor in survivors.views:
            hollow_out(tensor)
    for parameter, layout, part in parts:
        create_provisional_store(job, layout, parameter, part)


def _agreed_survivors(job: Job, recorder: Recorder, before: Mapping[int, nn.Parameter]) -> _Survivors:
    """Return the surviving tensors, after a check that all ranks have recorded the same program. A collective."""
    problem: BaseException | None = None
    survivors = _Survivors((), frozenset(), ())
    lines: list[str] = []
    try:
        recorder.note_reseeds()
        with _torch.plain_tensors():
            survivors = _survivors(recorder, before)
            states = [watched.initial for watched in recorder.generators.watched]
            views = [view for _, view in survivors.parameters]
            lines = fingerprint(recorder.program, states, views, sorted(survivors.whole))
    except BaseException as error:
        problem = error
    agree(job, _DOING, digest(lines), lambda: _numbered(lines), problem)
    return survivors


def _survivors(recorder: Recorder, before: Mapping[int, nn.Parameter]) -> _Survivors:
    """Return the tensors of the construction that are still alive.

    Raises:
        ConfigError: a module is lazy, or a parameter has a gradient.
    """
    live = live_tensors()
    parameters = [
        tensor
        for tensor in live
        if isinstance(tensor, nn.Parameter)
        and id(tensor) not in before
        and not tensor.is_meta
        and store_of(tensor) is None
    ]
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ConfigError(
            "a lazy module inside sharded_init() has parameters without a shape, which cannot be sharded\n"
            "Give the module its sizes, or construct it outside of sharded_init() and run it once."
        )
    trained = next((parameter for parameter in parameters if parameter.grad is not None), None)
    if trained is not None:
        raise ConfigError(
            f"backward() inside sharded_init() gave a parameter of shape {tuple(trained.shape)} a gradient, which a "
            "sharded parameter cannot keep\nTrain in a graph, or call model.zero_grad() inside the block."
        )
    # A memory from numpy that no operator has used gets its number here, in the same order on all ranks.
    non_empty = (parameter for parameter in parameters if parameter.numel())
    ordered = sorted(non_empty, key=lambda parameter: _sort_key(recorder, parameter))
    sharded = tuple((parameter, ref(parameter, recorder.take_in(parameter))) for parameter in ordered)
    parameter_memories = {view.memory for _, view in sharded}
    memories = recorder.program.memories
    operations = [entry for entry in recorder.program.entries if isinstance(entry, Operation)]
    # Memories from before the block that the construction writes.
    whole = {number for operation in operations for number in operation.writes if memories[number].outside}
    views = []
    sharded_ids = set(map(id, ordered))
    for tensor in live:
        memory = None if tensor.is_meta or id(tensor) in sharded_ids else recorder.memory_of(tensor)
        if memory is not None and not memory.outside:
            if memory.number in parameter_memories:
                views.append(tensor)
            else:
                whole.add(memory.number)
    return _Survivors(sharded, frozenset(whole), tuple(views))


def _sort_key(recorder: Recorder, parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return a key that orders parameters equally on all ranks."""
    memory = recorder.memory_of(parameter)
    shape = parameter.storage_offset(), tuple(parameter.shape), parameter.stride(), str(parameter.dtype)
    return (0, memory.number, *shape) if memory is not None else (1, digest_of(parameter.untyped_storage()), *shape)


def _replayed(
    job: Job, recorder: Recorder, survivors: _Survivors
) -> tuple[list[_Part], dict[int, torch.UntypedStorage]]:
    """Run the program with rank 0's random numbers. A collective.

    Returns:
        This rank's parts of the parameters, and the storages of whole memories by number.
    """
    problem: BaseException | None = None
    parts: list[_Part] = []
    whole: dict[int, torch.UntypedStorage] = {}
    by_memory: dict[int, list[tuple[nn.Parameter, Ref]]] = {}
    for parameter, view in survivors.parameters:
        by_memory.setdefault(view.memory, []).append((parameter, view))

    def take(number: int, storage: torch.UntypedStorage) -> None:
        for parameter, view in by_memory.get(number, ()):
            layout = provisional_layout(job, parameter)
            parts.append((parameter, layout, split_part(job, layout, tensor_at(view, storage))))
        if number in survivors.whole:
            whole[number] = storage

    try:
        with _torch.plain_tensors():
            replay(recorder.program, {*by_memory, *survivors.whole}, recorder.generators, take)
    except BaseException as error:
        problem = error
    agree(job, "sharding the parameters of sharded_init()", 0, dict, problem)
    return parts, whole


def _fill(memory: Memory, values: torch.UntypedStorage) -> None:
    """Copy the values into the memory's own storage, which gets its size first if it is hollow."""
    if not memory.outside:
        memory.storage.resize_(memory.nbytes)
    memory.storage.copy_(values)


def _abandon(recorder: Recorder) -> None:
    """Restore the generators, and make every tensor of the construction that is still alive hollow."""
    recorder.generators.restore()
    with _torch.plain_tensors(), torch.no_grad():
        for tensor in live_tensors():
            memory = None if tensor.is_meta else recorder.memory_of(tensor)
            if memory is not None and not memory.outside and tensor.numel():
                hollow_out(tensor)


def _numbered(lines: Sequence[str]) -> dict[str, str]:
    return {f"line {number} of the construction": line for number, line in enumerate(lines)}
