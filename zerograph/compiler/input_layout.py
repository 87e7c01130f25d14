"""How plain inputs lie on the mesh by the options of a graph, and along which mesh dimensions ZeRO splits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from zerograph.config import Config
from zerograph.errors import ConfigError, InputError, PlacementError
from zerograph.ir.annotate import is_replicated
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, Split, broadcast, dims_split, is_dtensor, nd_sbp

# The dimension of inputs that runs over the positions of a sequence.
_POSITIONS = 1


def batch_on(config: Config, mesh: Mesh) -> NdSbp:
    """Return the SBP of plain input tensors on a mesh.

    Raises:
        ConfigError: both ``input_sbp`` and ``context_parallel`` say how inputs are split.
        PlacementError: ``input_sbp`` has another number of entries, or the last mesh dimension another number of ranks
            than ``context_parallel``.
    """
    ranks = config.mesh.context_parallel
    if ranks == 1:
        return (Split(0),) * mesh.dims if config.mesh.input_sbp is None else nd_sbp(config.mesh.input_sbp, mesh.dims)
    if config.mesh.input_sbp is not None:
        raise ConfigError(
            f"config.mesh.context_parallel = {ranks} and config.mesh.input_sbp both say how inputs are split\n"
            "Leave input_sbp out if ranks pass whole sequences, or context_parallel if each passes its piece."
        )
    if mesh.shape[-1] != ranks:
        raise PlacementError(
            f"config.mesh.context_parallel is {ranks}, but the last dimension of the placement has {mesh.shape[-1]} "
            "ranks\nLeave config.mesh.placement out, or give it that many ranks along its last dimension."
        )
    return (*(Split(0),) * (mesh.dims - 1), Split(_POSITIONS))


def rows_on(config: Config, mesh: Mesh) -> NdSbp:
    """Return the SBP of the rows of plain input tensors: the same, without mesh dimensions that split sequences."""
    return tuple(entry if entry == Split(0) else broadcast for entry in batch_on(config, mesh))


def ranks_of_row(config: Config) -> int:
    """Return the number of ranks along the last dimension of a mesh that the options ask for; 1 for no such dimension.

    Raises:
        ConfigError: ``context_parallel`` and ``expert_parallel`` ask for different ones.
    """
    sequence, experts = config.mesh.context_parallel, config.mesh.expert_parallel
    if 1 not in (sequence, experts) and sequence != experts:
        raise ConfigError(
            f"config.mesh.context_parallel is {sequence} and config.mesh.expert_parallel is {experts}: both are the "
            "ranks of a row\nSet them to the same number, or one of them to 1."
        )
    return max(sequence, experts)


def with_rows(mesh: Mesh, config: Config) -> Mesh:
    """Return a mesh of one dimension as rows of as many ranks as the options ask for; any other mesh unchanged.

    Raises:
        ConfigError: the options contradict each other.
        PlacementError: the number of ranks is no multiple.
    """
    ranks = ranks_of_row(config)
    if ranks == 1 or mesh.dims > 1 or mesh.size == ranks:
        return mesh
    if mesh.size % ranks:
        option = "context_parallel" if config.mesh.context_parallel > 1 else "expert_parallel"
        raise PlacementError(f"config.mesh.{option} = {ranks} does not divide the {mesh.size} ranks of the job")
    groups = tuple(f"{mesh.groups[0]}{dim}" for dim in range(2))
    return Mesh((mesh.size // ranks, ranks), divmod(mesh.position[0], ranks), groups)


def sequence_length(inputs: Iterable[tuple[str, Tensor]], ranks: int) -> int:
    """Return the number of positions of the plain inputs, of which ranks take their pieces.

    It is dimension 1 of the first tensor of tokens [batch, length], or else of the first [batch, length, channels].

    Raises:
        InputError: no input is a sequence, or the ranks do not divide its length.
    """
    name, length = length_of(inputs)
    option = f"config.mesh.context_parallel = {ranks}"
    if length is None:
        raise InputError(
            f"{option}, but no input is a sequence: tokens [batch, length], or [batch, length, channels]\n"
            "Pass one, or say with config.mesh.input_sbp which dimension of the inputs ranks split."
        )
    if length % ranks or not length:
        raise InputError(
            f"{name} has {length} positions in dimension 1, which {option} does not divide\n"
            "Pad the sequences to a multiple of it, with labels of -100 at the end."
        )
    return length


def length_of(inputs: Iterable[tuple[str, Tensor]]) -> tuple[str, int | None]:
    """Return the name of the first input that is a sequence, and its positions; None without one.

    It is the first plain tensor of tokens [batch, length], or else the first [batch, length, channels].
    """
    plain = [(name, x) for name, x in inputs if not is_dtensor(x) and not is_replicated(x)]
    tokens = [(name, x) for name, x in plain if x.dim() == 2 and not x.is_floating_point()]
    sequences = [*tokens, *((name, x) for name, x in plain if x.dim() == 3)]
    return next(((name, x.shape[_POSITIONS]) for name, x in sequences), ("", None))


def is_sequence(x: Tensor, length: int) -> bool:
    """Return whether a plain input has the positions of the sequence in dimension 1."""
    return x.dim() > _POSITIONS and x.shape[_POSITIONS] == length


def split_sequences(inputs: Iterable[NdSbp]) -> bool:
    """Return whether ranks split another dimension of an input than 0."""
    return any(isinstance(entry, Split) and entry.dim > 0 for sbp in inputs for entry in sbp)


def zero_dims_on(
    config: Config, mesh: Mesh, inputs: Sequence[NdSbp] = (), parameters: Sequence[NdSbp] = ()
) -> tuple[int, ...]:
    """Return the mesh dimensions along which ZeRO splits, ascending.

    Args:
        inputs: placements of the batch's tensors; if none is split, those of plain ones count.
        parameters: placements that the user gave parameters.

    Raises:
        PlacementError: the mesh has no such dimension.
    """
    if config.zero.shard_dims is not None:
        dims = config.zero.shard_dims if isinstance(config.zero.shard_dims, tuple) else (config.zero.shard_dims,)
        if dims[-1] >= mesh.dims:
            raise PlacementError(
                f"config.zero.shard_dims is {config.zero.shard_dims}, but the placement has {mesh.dims} dimension(s)"
            )
        return dims
    split = dims_split(inputs) or dims_split([batch_on(config, mesh)])
    free = split - dims_split(parameters) or split or {mesh.dims - 1}
    if split_sequences(inputs):
        return (max(free, key=lambda dim: (mesh.shape[dim], -dim)),)
    return (max(free),)
