"""Construct models that are sharded from the start, with the values of plain construction: ``sharded_init()``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from zerograph import _torch
from zerograph.config import Config
from zerograph.errors import ConfigError, PlacementError
from zerograph.runtime.job.exchange import broadcast_from
from zerograph.runtime.job.process_group import Job, join
from zerograph.runtime.parameters import hollow_out
from zerograph.runtime.state import create_provisional_store, provisional_layout, store_of
from zerograph.runtime.tensor_hash import hash_bits
from zerograph.state.construction import Construction, Guard

# The job of the active construction, if any.
_constructing: list[Job] = []


@contextlib.contextmanager
def sharded_init(placement: DeviceMesh | None = None) -> Iterator[None]:
    """Construct models inside with parameters that are sharded from the start and never all whole on a rank.

    After ``with zg.sharded_init(): model = Llama(config)``, ``model`` has bitwise the values that it would have on one
    device, with rank 0's random state. Every rank runs the whole construction, and keeps its part of each large tensor
    as soon as an operator uses other tensors. A tensor that is used again is gathered for that. The default random
    generators end in the state that plain construction would leave on rank 0. Memory: this rank's parts, and the few
    whole tensors that an operator of the construction uses.

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
        CaptureError: the construction does something that split tensors cannot do.
        RankMismatchError: ranks construct different models, or another rank has failed.
        CommunicationError: another rank does not answer.
    """
    if _constructing:
        # The outer block does all. Another placement is not what it would give.
        with _torch.plain_tensors(), _torch.no_modes():
            if placement is not None and join_for("sharded_init()", placement) is not _constructing[0]:
                raise PlacementError("sharded_init() inside of sharded_init() has another placement: leave it out")
        yield
        return
    if torch.compiler.is_compiling():
        raise ConfigError("sharded_init() inside of build(): construct the model before, and give it to the graph")
    job = join_for("sharded_init()", placement)
    with _torch.plain_tensors():
        # Parameters that exist already are not sharded.
        before = {id(tensor): tensor for tensor in _live_tensors() if isinstance(tensor, nn.Parameter)}
    construction = Construction(job)
    generators = _default_generators()
    originals = [generator.get_state() for generator in generators]
    _constructing.append(job)
    try:
        states = [state.clone() for state in originals]
        broadcast_from(job, states, what="random numbers")
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        with construction, Guard(construction):
            yield
        _finish(job, construction, before)
    except BaseException as error:
        for generator, state in zip(generators, originals, strict=True):
            generator.set_state(state)
        _abandon(construction)
        if construction.problem is None:
            # The other ranks wait for this one.
            construction.agree(error)
        raise
    finally:
        _constructing.clear()


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
    return join(Config().checks.timeout, placement)


def is_constructing() -> bool:
    """Return whether a :func:`sharded_init` block is active: tensors constructed in it are only parts."""
    return bool(_constructing)


def _default_generators() -> list[torch.Generator]:
    generators = [torch.default_generator]
    if torch.cuda.is_available():
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def _finish(job: Job, construction: Construction, before: Mapping[int, nn.Parameter]) -> None:
    """Shard the parameters, and make everything else whole. A collective.

    Raises:
        ConfigError: a module is lazy, or a parameter has a gradient.
    """
    if construction.problem is not None:
        # The construction has caught it.
        raise construction.problem
    gc.collect()
    with _torch.plain_tensors(), torch.no_grad():
        live = _live_tensors()
        parameters = _parameters(construction, live, before)
        construction.note_tensors(parameters)
        sharded = {construction.memory_of(parameter) for parameter in parameters}
        whole = {memory: storage for memory, storage in construction.created().items() if memory not in sharded}
        hollow = [memory.number for memory, storage in whole.items() if not storage.nbytes()]
        construction.note(f"parameters {[construction.shown(one) for one in parameters]}, others {hollow}")
        construction.agree()
        parts = []
        for parameter in parameters:
            layout = provisional_layout(job, parameter.shape, parameter.dtype, parameter.device)
            parts.append((layout, parameter, construction.part(parameter.detach(), layout)))
        for storage in whole.values():
            construction.make_whole(storage)
        construction.agree()
        sharded_ids = set(map(id, parameters))
        for tensor in live:
            memory = None if tensor.is_meta or id(tensor) in sharded_ids else construction.memory_of(tensor)
            if memory is not None and memory in sharded and not memory.outside:
                hollow_out(tensor)
    for layout, parameter, part in parts:
        create_provisional_store(job, layout, parameter, part)


def _parameters(
    construction: Construction, live: Sequence[Tensor], before: Mapping[int, nn.Parameter]
) -> list[nn.Parameter]:
    """Return the parameters that the construction has created, equally ordered on all ranks."""
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

    def place(parameter: nn.Parameter) -> tuple[Any, ...]:
        memory = construction.memory_of(parameter)
        # A memory from numpy that no operator has used has no number yet.
        where = (0, memory.number) if memory is not None else (1, int(hash_bits(parameter.detach())))
        return *where, parameter.storage_offset(), tuple(parameter.shape), parameter.stride(), str(parameter.dtype)

    return sorted((parameter for parameter in parameters if parameter.numel()), key=place)


def _abandon(construction: Construction) -> None:
    """Make every tensor that the construction has created and that is still alive hollow."""
    with _torch.plain_tensors(), torch.no_grad():
        for tensor in _live_tensors():
            memory = None if tensor.is_meta else construction.memory_of(tensor)
            if memory is not None and not memory.outside and tensor.numel():
                hollow_out(tensor)


def _live_tensors() -> list[Tensor]:
    """Return all plain tensors and parameters that are alive in the process, each once."""
    return [
        instance
        for instance in gc.get_objects()
        if issubclass(type(instance), Tensor)
        and (type(instance) is Tensor or issubclass(type(instance), nn.Parameter))
        and instance.layout == torch.strided
    ]
