"""The sizes of a graph's inputs over its calls: which dimensions are static, and which are symbols of the step.

As with ``torch.compile`` the first size of a dimension is static, a second one makes the dimension dynamic, and further
sizes reuse that step. Dimension 0 of plain inputs may also differ between ranks, down to no rows at all. All ranks
gather the sizes of all ranks before each call, and choose from them alone, so they choose alike.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zerograph.capture.trace import TensorSpec
from zerograph.compiler.batch import Batch
from zerograph.errors import InputError
from zerograph.ir.dims import SMALLEST_DYNAMIC, Dim, SizeGuard
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import Split, show

# Combinations of sizes that are remembered with what they select.
_MAX_SELECTED = 1 << 12
_NO_LIMITS = (0, None)
Mode = Literal["auto"] | bool
# Number of an input, and one of its dimensions.
Where = tuple[int, int]


def local_sizes(batch: Batch) -> list[int]:
    """Return the sizes of this rank's plain inputs that the ranks tell each other, flat."""
    return [size for number in part_numbers(batch) for size in batch.tensors[number].shape]


def part_numbers(batch: Batch) -> list[int]:
    """Return the numbers of the inputs that are this rank's part of the batch."""
    return [
        number
        for number, tensor in enumerate(batch.tensors)
        if batch.plain[number] and tensor.dim() and not batch.whole[number]
    ]


@dataclass(frozen=True)
class Variant:
    """One form of the sizes of a kind of inputs, for which one step is compiled.

    Attributes:
        shapes: global shape of each input, with :class:`Dim` for dynamic dimensions.
        number: its number among those of the kind.
        guards: conditions on sizes that the captured graph relies on.
    """

    shapes: tuple[tuple[int | Dim, ...], ...]
    number: int
    guards: tuple[SizeGuard, ...] = ()

    def sizes(self, rows: Mapping[Where, tuple[int, ...]], shapes: _Shapes) -> dict[str, tuple[int, ...]] | None:
        """Return the sizes of each dynamic dimension along the ranks, or None if these shapes have another form."""
        found: dict[str, tuple[int, ...]] = {}
        for number, (wanted, actual) in enumerate(zip(self.shapes, shapes, strict=True)):
            for dim, (want, size) in enumerate(zip(wanted, actual, strict=True)):
                if not isinstance(want, Dim):
                    if want != size or _is_ragged(rows.get((number, dim), ())):
                        return None
                    continue
                each = rows[number, dim] if want.rows else (size,)
                if (size < SMALLEST_DYNAMIC and not _is_ragged(each)) or found.setdefault(want.name, each) != each:
                    return None
        totals = {name: sum(each) for name, each in found.items()}
        return found if all(guard.holds(totals) for guard in self.guards) else None

    def grown(self, sizes: Mapping[str, tuple[int, ...]]) -> Variant:
        """Return this variant with the largest sizes after a call of these sizes."""
        dims = {size for shape in self.shapes for size in shape if isinstance(size, Dim)}
        if all(dim.holds(sizes[dim.name]) for dim in dims):
            return self

        def grown(size: int | Dim) -> int | Dim:
            return size.grown(sizes[size.name]) if isinstance(size, Dim) else size

        return replace(self, shapes=tuple(tuple(map(grown, shape)) for shape in self.shapes))


# Inputs without their sizes and marks (``Batch.pattern()``), and ``config.dynamic_shapes``.
Kind = tuple[Hashable, Mode]
_Shapes = Sequence[Sequence[int]]


@dataclass
class _History:
    """The sizes of inputs of one kind so far, and the variants of their step."""

    first: _Shapes | None = None
    dynamic: set[Where] = field(default_factory=set)
    limits: dict[Where, tuple[int, int | None]] = field(default_factory=dict)
    largest: dict[Where, int] = field(default_factory=dict)
    # The most rows of one rank.
    largest_part: dict[Where, int] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    # Why no step with dynamic dimensions can be compiled.
    refused: str | None = None
    # What calls with the same sizes on all ranks, and the same marks, selected before.
    selected: dict[
        tuple[tuple[tuple[int, ...], ...], Hashable],
        tuple[tuple[TensorSpec, ...], Mapping[str, tuple[int, ...]], int, int],
    ] = field(default_factory=dict)

    def needs_equal_rows(self, batch: Batch, mode: Mode) -> str | None:
        """Return why all ranks must hold equally many rows; None if they need not."""
        if mode is False:
            return "config.dynamic_shapes is False, or config.backend is a function, which gets a graph of one size"
        if batch.micro_batches > 1:
            option = f"config.gradient_accumulation_steps = {batch.micro_batches}"
            return f"{option} cuts each part into equal micro-batches"
        return None if self.refused is None else f"the step has equal parts only: {self.refused}"

    def note(
        self,
        batch: Batch,
        shapes: _Shapes,
        parts: Mapping[int, tuple[int, ...]],
        ragged: Sequence[Where],
        mode: Mode,
    ) -> None:
        """Note the sizes of a call, and which dimensions they make dynamic.

        Raises:
            InputError: a size is outside of the limits that the user declared.
        """
        marked = {(number, dim): limits for number in parts for dim, limits in batch.marks[number]}
        for (number, dim), limits in {**self.limits, **marked}.items():
            _check_limits(limits, batch.names[number], dim, parts[number] if dim == 0 else (shapes[number][dim],))
        for (number, dim), limits in marked.items():
            if self.limits.get((number, dim), _NO_LIMITS) != limits:
                # Memory of these was predicted for other limits.
                self.variants = [one for one in self.variants if isinstance(one.shapes[number][dim], int)]
                self.selected.clear()
        self.limits |= marked
        self.dynamic.update(marked)
        if self.first is None:
            self.first = shapes
        for number in parts:
            for dim, size in enumerate(shapes[number]):
                where = number, dim
                self.largest[where] = max(self.largest.get(where, 0), size)
                self.largest_part[where] = max(self.largest_part.get(where, 0), *parts[number])
                if mode is True or (mode == "auto" and size != self.first[number][dim]):
                    self.dynamic.add(where)
        if ragged:
            self.dynamic.update((number, 0) for number in parts)


class Dimensions:
    """Selects the form of the sizes of each call of one graph."""

    def __init__(self) -> None:
        self._kinds: defaultdict[Hashable, _History] = defaultdict(_History)

    def resolve(
        self,
        batch: Batch,
        kind: Kind,
        everybody: Sequence[Sequence[int]],
        mesh: Mesh,
        taken: Callable[[], Collection[int]],
    ) -> Batch:
        """Return the batch with its global shapes, from the sizes of all ranks.

        Args:
            batch: as :func:`zerograph.compiler.batch.read_batch` read it on this rank.
            kind: the kind of its inputs.
            everybody: for each rank what :func:`local_sizes` returned there.
            mesh: the ranks.
            taken: returns sizes of the model, which dynamic dimensions are not traced with.

        Raises:
            InputError: on all ranks alike: the ranks' inputs do not make one batch.
        """
        history = self._kinds[kind]
        key = tuple(map(tuple, everybody)), batch.marks
        if key not in history.selected:
            if len(history.selected) >= _MAX_SELECTED:
                history.selected.clear()
            variant, sizes = self._select(history, batch, everybody, mesh, kind[1], taken())
            split = [_split_dims(batch, number, mesh) for number in part_numbers(batch)]
            place = next((mesh.position[dims[0]] for dims in split if dims), 0)
            specs = tuple(replace(spec, shape=one) for spec, one in zip(batch.specs, variant.shapes, strict=True))
            history.selected[key] = specs, sizes, place, variant.number
        return batch.resolved(*history.selected[key])

    def add_guards(self, kind: Kind, variant: int, guards: Sequence[SizeGuard]) -> None:
        """Note what the captured graph of a variant relies on: other sizes select another variant."""
        history = self._kinds[kind]
        if guards:
            at = next(index for index, one in enumerate(history.variants) if one.number == variant)
            history.variants[at] = replace(history.variants[at], guards=tuple(guards))
            history.selected.clear()

    def refuse(self, kind: Kind, reason: str) -> None:
        """Select static sizes only from now on, since a step with dynamic dimensions could not be compiled."""
        history = self._kinds[kind]
        history.refused = reason
        history.variants = [variant for variant in history.variants if not _is_dynamic(variant)]
        history.selected.clear()

    def _select(
        self,
        history: _History,
        batch: Batch,
        everybody: Sequence[Sequence[int]],
        mesh: Mesh,
        mode: Mode,
        taken: Collection[int],
    ) -> tuple[Variant, dict[str, tuple[int, ...]]]:
        """Return the variant that serves these sizes, a new one if there is none, and the sizes of its dimensions."""
        shapes, rows, parts = _global_shapes(batch, everybody, mesh)
        ragged = [where for where, each in rows.items() if _is_ragged(each)]
        reason = history.needs_equal_rows(batch, mode)
        if ragged and reason is not None:
            raise InputError(_uneven(batch, everybody, reason))
        history.note(batch, shapes, parts, ragged, mode)
        if batch.micro_batches > 1 or history.refused is not None:
            history.dynamic.clear()
        if _is_grid(mesh):
            history.dynamic -= rows.keys()
        for at, variant in enumerate(history.variants):
            sizes = variant.sizes(rows, shapes)
            if sizes is not None:
                history.variants[at] = variant.grown(sizes)
                return history.variants[at], sizes
        symbolic = _symbolic(history, shapes, rows, ragged, batch.micro_batches, taken)
        variant = Variant(symbolic, next(history.numbers))
        history.variants.append(variant)
        sizes = variant.sizes(rows, shapes)
        assert sizes is not None
        return variant, sizes


def _global_shapes(
    batch: Batch, everybody: Sequence[Sequence[int]], mesh: Mesh
) -> tuple[list[tuple[int, ...]], dict[Where, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Return the global shape of each input, its rows along the mesh dimension that splits it, and those of each rank.

    Raises:
        InputError: no rank has rows, ranks differ in another dimension, or their numbers of rows must be equal.
    """
    shapes = [tuple(size for size in spec.shape if isinstance(size, int)) for spec in batch.specs]
    rows: dict[Where, tuple[int, ...]] = {}
    parts: dict[int, tuple[int, ...]] = {}
    at = 0
    for number in part_numbers(batch):
        dims = batch.tensors[number].dim()
        each = [tuple(sizes[at : at + dims]) for sizes in everybody]
        at += dims
        parts[number] = lengths = tuple(shape[0] for shape in each)
        split = _split_dims(batch, number, mesh)
        if not split or _is_grid(mesh):
            if _is_ragged(lengths):
                grid = "the placement has several dimensions, which need equal parts"
                reason = grid if _is_grid(mesh) else f"it is {show(batch.sbp[number])}"
                raise InputError(_uneven(batch, everybody, reason))
            lengths = (lengths[0] * math.prod(mesh.shape[dim] for dim in split),)
        shapes[number] = (sum(lengths), *_other_sizes(batch.names[number], each))
        rows[number, 0] = lengths
    return shapes, rows, parts


def _check_limits(limits: tuple[int, int | None], name: str, dim: int, each: Sequence[int]) -> None:
    """Check the size of a dimension, for dimension 0 that of each rank's part. A part without rows has no minimum."""
    low, high = limits
    for rank, size in enumerate(each):
        if (size < low and size) or (high is not None and size > high):
            where = f" on rank {rank}" if len(each) > 1 else ""
            raise InputError(
                f"{name} has size {size} in dimension {dim}{where}, outside of the limits that mark_dynamic() "
                f"declared: {low} to {'any size' if high is None else high}\n"
                "Pass a smaller or larger batch, or declare other limits."
            )


def _other_sizes(name: str, each: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of an input in all dimensions but 0, which are equal on all ranks that have rows.

    Args:
        name: the input, for messages.
        each: its shape on each rank.

    Raises:
        InputError: they are not equal, or no rank has rows.
    """
    filled = {rank: shape for rank, shape in enumerate(each) if shape[0]}
    if not filled:
        raise InputError(
            f"{name} has no rows on any rank\nStop when all ranks are out of data: zg.batches(loader) does."
        )
    first = next(iter(filled))
    for rank, shape in filled.items():
        if shape[1:] != filled[first][1:]:
            raise InputError(
                f"{name} has shape {each[first]} on rank {first} and {shape} on rank {rank}\n"
                "Ranks may hold any number of rows, but all other dimensions are equal: pad each batch to the "
                "longest sample of all ranks, or to a fixed length."
            )
    return filled[first][1:]


def _is_grid(mesh: Mesh) -> bool:
    """Return whether ranks lie along several mesh dimensions: a symbol for rows belongs to one."""
    return sum(size > 1 for size in mesh.shape) > 1


def _split_dims(batch: Batch, number: int, mesh: Mesh) -> list[int]:
    """Return the mesh dimensions of several ranks that split an input."""
    return [dim for dim, sbp in enumerate(batch.sbp[number]) if isinstance(sbp, Split) and mesh.shape[dim] > 1]


def _is_dynamic(variant: Variant) -> bool:
    return any(isinstance(size, Dim) for shape in variant.shapes for size in shape)


def _is_ragged(rows: Sequence[int]) -> bool:
    return len(set(rows)) > 1


def _uneven(batch: Batch, everybody: Sequence[Sequence[int]], reason: str) -> str:
    """Return a message that ranks hold unequal parts."""
    first = part_numbers(batch)[0]
    counts = ", ".join(f"{sizes[0]} on rank {rank}" for rank, sizes in enumerate(everybody))
    return (
        f"ranks hold unequal numbers of rows, and {reason}: {batch.names[first]} has {counts}\n"
        "Use a loader with drop_last=True, or pad the smaller parts."
    )


def _symbolic(
    history: _History,
    shapes: _Shapes,
    rows: Mapping[Where, tuple[int, ...]],
    ragged: Sequence[Where],
    micro_batches: int,
    taken: Collection[int],
) -> tuple[tuple[int | Dim, ...], ...]:
    """Return the shapes with symbols in place of dynamic dimensions; equal sizes share one."""
    primes = _primes(set(taken))
    dims: dict[Hashable, Dim] = {}
    identities: dict[Where, Hashable] = {}
    for number, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            where = number, dim
            if where not in history.dynamic or (size < SMALLEST_DYNAMIC and where not in ragged):
                continue
            identities[where] = identity = where in rows, rows.get(where, size)
            if identity not in dims:
                pieces = len(rows[where]) * micro_batches if where in rows else 1
                prime = primes(max(size // pieces, 11))
                name = f"s{len(dims)}"
                largest, part = history.largest[where], history.largest_part[where]
                dims[identity] = Dim(name, prime * pieces, where in rows, pieces, largest, part)
            dims[identity] = _limited(
                dims[identity], *history.limits.get(where, _NO_LIMITS), len(rows.get(where, (0,)))
            )

    def symbolic(where: Where, size: int) -> int | Dim:
        return dims[identities[where]] if where in identities else size

    return tuple(
        tuple(symbolic((number, dim), size) for dim, size in enumerate(shape)) for number, shape in enumerate(shapes)
    )


def _limited(dim: Dim, low: int, high: int | None, parts: int) -> Dim:
    """Return the dimension within further limits.

    Args:
        low, high: the limits; for a row dimension those of one rank's rows.
        parts: number of ranks that hold rows.
    """
    low = max(low, dim.minimum)
    if high is None or (dim.maximum is not None and dim.maximum <= high):
        return replace(dim, minimum=low)
    return replace(dim, minimum=low, maximum=high, largest=high * parts, largest_part=high)


def _primes(taken: set[int]) -> Callable[[int], int]:
    """Return a function that returns the next unused prime from a number on, which divides no size in ``taken``."""

    def next_prime(start: int) -> int:
        candidate = start
        while not all(candidate % factor for factor in range(2, math.isqrt(candidate) + 1)) or any(
            size and size % candidate == 0 for size in taken
        ):
            candidate += 1
        taken.add(candidate)
        return candidate

    return next_prime
