"""Data of several ranks: batches until every rank is done, and outputs of all ranks in order."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.compiler.batch import Layout, layout_of
from zerograph.config import Config
from zerograph.eager.tensor import GlobalTensor
from zerograph.errors import ConfigError, InputError
from zerograph.ir.annotate import is_replicated
from zerograph.ir.marks import copy_marks
from zerograph.ir.sbp import NdSbp, Split, broadcast, from_dtensor, is_dtensor, show
from zerograph.runtime.job.process_group import Job, agree, digest, explaining_failures, join
from zerograph.state.threads import one_thread

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
_NEVER, _DONE, _TAKEN = range(3)


class batches:  # noqa: N801
    """Iterate over a loader until all ranks are done: ``for batch in zg.batches(loader): step(batch)``.

    A rank that has run out yields its last batch without rows, so that it takes part in every step: tensors become
    ``x[:0]``, in any nesting. Constants, 0-d tensors and replicated tensors stay as they are. No sample is left out and
    none comes twice, so the steps compute what one device computes on the ranks' batches one after the other. Ranks
    exchange one small note per batch. All ranks iterate, and leave the loop at the same batch.

    Each loop is a new pass, unless a position was loaded.

    Attributes:
        epoch: number of passes over the loader that have ended, for ``sampler.set_epoch(data.epoch)``.
    """

    def __init__(self, loader: Iterable[Any], *, timeout: float | None = None) -> None:
        """Read batches of ``loader``.

        Args:
            loader: yields this rank's batches: a ``DataLoader``, or any other iterable.
            timeout: seconds until a rank that does not come with a batch is an error. None: as
                ``config.checks.timeout`` is by default.
        """
        self.epoch = 0
        self._loader = loader
        self._timeout = Config().checks.timeout if timeout is None else timeout
        self._taken = 0
        self._ran_out = False
        self._last: Any = None
        self._has_last = False
        self._generators_at_start: list[Tensor] | None = None
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of one pass, from its start or from the position that was loaded.

        Raises:
            RankMismatchError: on the other ranks, if the loader of a rank raises; that rank raises the loader's error.
            InputError: on all ranks, if a rank has never had a batch, or no rank has one in this pass; if the last
                batch of a rank that has run out has a value that cannot be emptied.
            CommunicationError: a rank does not come within the timeout.
        """
        return _Pass(self)

    def _begin(self) -> bool:
        """Begin a pass; return whether it continues at the position that was loaded."""
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self._taken, self._ran_out, self._generators_at_start = 0, False, None
        return resumed

    def _take(self, job: Job, iterator: Callable[[], Iterator[Any]]) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: all ranks are done.
        """
        batch, problem = None, None
        try:
            batch = self._next(iterator())
        except BaseException as error:
            problem = error
        state = _TAKEN if not self._ran_out else _DONE if self._has_last else _NEVER
        with one_thread("zg.batches()"):
            doing = f"batch {self._taken + 1} of zg.batches()"
            states = [sizes[0] for sizes in agree(job, doing, 0, dict, problem, (state,))]
        if _TAKEN not in states and self._taken:
            self.epoch, self._taken, self._generators_at_start = self.epoch + 1, 0, None
            raise StopIteration
        if _TAKEN not in states or _NEVER in states:
            raise InputError(_no_batch([rank for rank, one in enumerate(states) if one != _TAKEN], job.size))
        self._taken += 1
        return batch

    def _started(self) -> Iterator[Any]:
        self._generators_at_start = [generator.get_state() for generator in generators_of(self._loader)]
        return iter(self._loader)

    def _continued(self) -> Iterator[Any]:
        """Return an iterator over the loader's batches after those that were taken before."""
        if is_stateful(self._loader):
            # A loader whose state is at its end would begin anew.
            return iter(()) if self._ran_out else iter(self._loader)
        # The default generator continues where it is: step.load() has restored it.
        before = torch.get_rng_state()
        restore_generators(self._loader, self._generators_at_start or ())
        iterator = iter(self._loader)
        for batch in itertools.islice(iterator, self._taken):
            self._keep(batch)
        torch.set_rng_state(before)
        return iterator

    def _next(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch; the last one without rows if there is none."""
        if not self._ran_out:
            # A loader that is its own iterator begins anew at iter(), and so in a for loop.
            batch = next(iterator, self)
            if batch is not self:
                self._keep(batch)
                return batch
            self._ran_out = True
        if isinstance(self._last, InputError):
            raise self._last
        # A new nesting each time: the user may change what is yielded.
        return _mapped(self._last, _without_rows) if self._has_last else None

    def _keep(self, batch: Any) -> None:
        """Keep the batch without rows, before the user changes it."""
        self._has_last = True
        try:
            self._last = _mapped(batch, _without_rows)
        except InputError as error:
            self._last = error

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position: how many batches of the pass have been yielded. Each rank keeps its own.

        The loader's own ``state_dict()`` is part of it if it has one, as torchdata's ``StatefulDataLoader`` does.
        Otherwise the states of the random generators at the start of the pass are, so that it is shuffled alike again.
        """
        state = {"ranks": join(self._timeout).size, "epoch": self.epoch, "batches": self._taken}
        if is_stateful(self._loader):
            empty = (self._last,) if self._has_last and not isinstance(self._last, InputError) else None
            return {
                **state,
                "loader": self._loader.state_dict(),  # type: ignore[attr-defined]
                "ran_out": self._ran_out,
                "empty": empty,
            }
        at_start = self._generators_at_start
        generators = [one.get_state() for one in generators_of(self._loader)] if at_start is None else at_start
        return {**state, "generators": generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were yielded before :meth:`state_dict` returned ``state``.

        The next iteration yields the rest of the pass. Without a loader that has a state of its own it reads the
        batches again that were yielded, and drops them. Load the step's checkpoint first.

        Raises:
            ConfigError: the state is of another number of ranks, or of another kind of loader.
        """
        ranks = join(self._timeout).size
        if state["ranks"] != ranks:
            raise ConfigError(
                f"the position is of a job of {state['ranks']} rank(s), and this one has {ranks}: the ranks' batches "
                "are others\nContinue with as many ranks, or begin the pass anew."
            )
        stateful = is_stateful(self._loader)
        if stateful != ("loader" in state) or (
            not stateful and len(state["generators"]) != len(generators_of(self._loader))
        ):
            raise ConfigError(
                f"the position is of another kind of loader than {type(self._loader).__name__}: one has a state_dict() "
                "and the other has not, or they have other random generators"
            )
        self.epoch, self._taken, self._resumed = state["epoch"], state["batches"], state["batches"] > 0
        if stateful:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._ran_out = state["ran_out"]
            if state["empty"] is not None:
                (self._last,), self._has_last = state["empty"], True
        elif self._resumed:
            self._ran_out, self._generators_at_start = False, state["generators"]
        else:
            restore_generators(self._loader, state["generators"], but_default=True)


class _Pass:
    """One pass over ``zg.batches()``. After an error of the loader it goes on, as the loader's own pass does."""

    def __init__(self, owner: batches) -> None:
        self._owner, self._job = owner, join(owner._timeout)
        self._is_done, self._resumed = False, owner._begin()
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration
        try:
            return self._owner._take(self._job, self._opened)
        except StopIteration:
            self._is_done = True
            raise

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._owner._continued() if self._resumed else self._owner._started()
        return self._iterator


def is_stateful(loader: Any) -> bool:
    """Return whether a loader has a position of its own."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the default generator and those that a ``DataLoader`` shuffles with."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    candidates = (getattr(one, "generator", None) for one in (loader, sampler, inner))
    own = [generator for generator in candidates if isinstance(generator, torch.Generator)]
    return list({id(generator): generator for generator in (torch.default_generator, *own)}.values())


def restore_generators(loader: Any, states: Sequence[Tensor], *, but_default: bool = False) -> None:
    """Restore :func:`generators_of` a loader; with ``but_default`` the default generator continues where it is."""
    for generator, state in list(zip(generators_of(loader), states, strict=True))[but_default:]:
        generator.set_state(state)


def _no_batch(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return (
            "zg.batches(): no rank has a batch in this pass\n"
            "A generator yields once only: pass a DataLoader or another iterable that can be read again, or a new "
            "zg.batches() per pass. Else check that the data are there."
        )
    return (
        f"zg.batches(): rank(s) {', '.join(map(str, ranks))} of {size} have no batch while others have some\n"
        "A rank that runs out continues with its last batch without rows, so it needs one batch: spread the data so "
        "that each rank has some, or use fewer ranks."
    )


def _without_rows(value: Any) -> Any:
    if is_dtensor(value):
        if any(isinstance(one, Split) for one in from_dtensor(value.placements)):
            raise InputError(
                "zg.batches(): a rank has run out whose last batch has a split DTensor, which has as many rows on each "
                "rank\nYield plain tensors."
            )
        return value
    if isinstance(value, Tensor):
        # A view would keep the whole batch in memory.
        return value if value.dim() == 0 or is_replicated(value) else copy_marks(value, value[:0].clone())
    if hasattr(value, "__array__") and hasattr(value, "ndim") and value.ndim:
        return value[:0].copy()
    if isinstance(value, _CONSTANTS) or hasattr(value, "__array__"):
        return value
    raise InputError(
        f"zg.batches(): a rank has run out whose last batch has a {type(value).__name__}, of which zerograph does not "
        "know how to take no rows\nYield tensors and constants in lists, tuples and dicts, or register the type with "
        "torch.utils._pytree."
    )


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the nesting with ``function`` of each leaf. Mappings that are no dicts, as of tokenizers, are copied."""

    def mapped(leaf: Any) -> Any:
        if not isinstance(leaf, MutableMapping):
            return function(leaf)
        copied = copy.copy(leaf)
        for key in leaf:
            copied[key] = _mapped(leaf[key], function)
        return copied

    return pytree.tree_map(mapped, value)


def gather(outputs: Any, *, timeout: float | None = None) -> Any:
    """Return outputs of a graph with the rows of all ranks, in rank order, on every rank. A collective.

    Split outputs may have another number of rows on each rank, none included. Outputs that are whole already, 0-d
    tensors and constants stay as they are. A plain tensor that is no output of a graph counts as this rank's rows, also
    one that was computed from an output.

    Args:
        outputs: tensors and constants in any nesting.
        timeout: seconds until a rank that does not answer is an error. None: as ``config.checks.timeout`` is by
            default.

    Returns:
        The same nesting; tensors [rows of all ranks, ...] on their device. DTensors become plain, whole tensors.

    Raises:
        RankMismatchError: ranks differ in the number of outputs, a dtype or a number of dimensions.
        InputError: on all ranks, if parts with rows differ in another dimension than that of the rows.
    """
    job = join(Config().checks.timeout if timeout is None else timeout)
    leaves: list[Any] = []
    _mapped(outputs, leaves.append)
    whole = {
        number: leaf.full_tensor().detach() for number, leaf in enumerate(leaves) if isinstance(leaf, GlobalTensor)
    }
    layouts = {
        number: _layout(leaf, job.grid)
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and number not in whole
    }
    for number, value in whole.items():
        leaves[number] = value
    split_numbers = [number for number, (sbp, _) in layouts.items() if any(isinstance(one, Split) for one in sbp)]
    facts = {f"output {number}": _described(leaves[number], *layouts[number]) for number in layouts}
    parts = [leaves[n] for n in split_numbers if not is_dtensor(leaves[n])]
    with one_thread("zg.gather()"):
        sizes = [size for part in parts for size in part.shape]
        everybody = agree(job, "zg.gather()", digest(facts), lambda: facts, sizes=sizes)
        if job.size > 1:
            shapes = [_shapes(rank_sizes, parts) for rank_sizes in everybody]
            numbers = [n for n in split_numbers if not is_dtensor(leaves[n])]
            for place, number in enumerate(numbers):
                _check_shapes(number, layouts[number][0], [rank_shapes[place] for rank_shapes in shapes])
            with explaining_failures(job, "zg.gather()"):
                pieces = _exchange(parts, shapes, job.data)
            for place, number in enumerate(numbers):
                leaves[number] = _joined([rank_parts[place] for rank_parts in pieces], *layouts[number])
        with explaining_failures(job, "zg.gather()"):
            results = iter([leaf.full_tensor() if is_dtensor(leaf) else leaf for leaf in leaves])
    return _mapped(outputs, lambda _: next(results))


def _layout(tensor: Tensor, grid: Any) -> Layout:
    """Return the layout of an output; a tensor that is none is split along dimension 0 unless it must be whole."""
    if is_dtensor(tensor):
        return from_dtensor(tensor.placements), tensor.device_mesh.mesh.tolist()
    layout = layout_of(tensor)
    if layout is None or tensor.dim() == 0:
        return (broadcast if tensor.dim() == 0 or is_replicated(tensor) else Split(0),), grid
    return layout


def _described(tensor: Tensor, sbp: NdSbp, grid: Any) -> str:
    return f"{tensor.dim()} dimensions, {tensor.dtype}, {tensor.device.type}, {show(sbp)} on {grid}"


def _shapes(sizes: Sequence[int], parts: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of a rank's parts, from their sizes one after the other."""
    remaining = iter(sizes)
    return [tuple(itertools.islice(remaining, part.dim())) for part in parts]


def _check_shapes(number: int, sbp: NdSbp, shapes: Sequence[tuple[int, ...]]) -> None:
    dims = {one.dim for one in sbp if isinstance(one, Split)}
    filled = [shape for shape in shapes if all(shape[dim] for dim in dims)]
    others = {tuple(size for dim, size in enumerate(shape) if dim not in dims) for shape in filled}
    if len(others) > 1:
        lines = "".join(f"\n  rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise InputError(
            f"zg.gather(): the ranks' parts of output {number} are no parts of one tensor:{lines}\n"
            "They may differ in the number of rows only. Pad the other dimensions to one size."
        )


def _exchange(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[tuple[int, ...]]], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Return the parts of each rank: one all-gather of bytes per device, each rank's padded to the longest.

    Args:
        parts: of this rank.
        shapes: of the parts of each rank.
    """
    received = [list(parts) for _ in shapes]
    for device in dict.fromkeys(part.device for part in parts):
        places = [place for place, part in enumerate(parts) if part.device == device]
        plain = [parts[place].detach().resolve_conj().resolve_neg().contiguous() for place in places]
        # view(-1) would keep the stride of a part with at most one element, which no other dtype can view.
        own = torch.cat([part.as_strided((part.numel(),), (1,)).view(torch.uint8) for part in plain])
        lengths = [
            [math.prod(rank_shapes[place]) * parts[place].element_size() for place in places] for rank_shapes in shapes
        ]
        longest = max(map(sum, lengths))
        if longest:
            everything = own.new_empty(len(shapes) * longest)
            _torch.all_gather(everything, F.pad(own, (0, longest - len(own))), group)
        else:
            everything = own
        for rank, rank_lengths in enumerate(lengths):
            pieces = everything[rank * longest :][: sum(rank_lengths)].split(rank_lengths)
            for place, piece in zip(places, pieces, strict=True):
                # A copy, which is aligned for its dtype.
                received[rank][place] = piece.clone().view(parts[place].dtype).view(shapes[rank][place])
    return received


def _joined(pieces: Sequence[Tensor], sbp: NdSbp, grid: Any) -> Tensor:
    """Return the whole of a tensor from the pieces of all ranks."""
    if not sbp:
        piece: Tensor = pieces[grid]
        return piece
    first, *rest = sbp
    along = [_joined(pieces, tuple(rest), row) for row in grid]
    if not isinstance(first, Split):
        return along[0]
    return torch.cat([piece for piece in along if piece.shape[first.dim]] or along[:1], first.dim)
