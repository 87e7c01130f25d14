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
from typing import Any, Literal

from zerograph.capture.trace import TensorSpec
from zerograph.compiler.batch import Batch
from zerograph.compiler.input_layout import split_sequences
from zerograph.compiler.plain_inputs import replica_groups
from zerograph.errors import InputError
from zerograph.ir.dims import SMALLEST_DYNAMIC, Dim, SizeGuard
from zerograph.ir.mesh import Mesh, global_shape, slice_counts
from zerograph.ir.sbp import Split, broadcast

# Combinations of sizes that are remembered with what they select.
_MAX_SELECTED = 1 << 12
_NO_LIMITS = (0, None)
# Smaller primes are likely sizes that a program computes or has as constants.
_SMALLEST_HINT = 11
Mode = Literal["auto"] | bool
# Number of an input, and one of its dimensions.
Where = tuple[int, int]
Shapes = Sequence[Sequence[int]]


def local_sizes(batch: Batch) -> list[int]:
    """Return the sizes of this rank's plain inputs that the ranks tell each other, flat."""
    return [size for number in part_numbers(batch) for size in batch.tensors[number].shape]


def sizes_on(mesh: Mesh, batch: Batch) -> list[list[int]]:
    """Return :func:`local_sizes` of all ranks of a mesh that is seen from the one with this batch."""
    counts = slice_counts(batch.slices or mesh.size, mesh.size)
    sizes = [(size, not dim) for number in part_numbers(batch) for dim, size in enumerate(batch.tensors[number].shape)]
    return [[size * count // counts[mesh.rank] if is_rows else size for size, is_rows in sizes] for count in counts]


def part_numbers(batch: Batch) -> list[int]:
    """Return the numbers of the inputs that are this rank's part of the batch."""
    return [number for number, is_part in enumerate(batch.parts) if is_part]


@dataclass(frozen=True)
class _Sizes:
    """The sizes of the inputs of a call on all ranks.

    Attributes:
        shapes: the global shapes.
        rows: the rows of each part that mesh dimensions make.
        parts: the rows of each rank's part, by number of the input.
        uneven: dimensions whose rows ranks or micro-batches split unequally.
    """

    shapes: Shapes
    rows: Mapping[Where, tuple[int, ...]]
    parts: Mapping[int, tuple[int, ...]]
    uneven: Collection[Where]


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

    @property
    def dims(self) -> set[Dim]:
        """The dynamic dimensions."""
        return {size for shape in self.shapes for size in shape if isinstance(size, Dim)}

    def matched(self, call: _Sizes) -> dict[str, tuple[int, ...]] | None:
        """Return the sizes of each dynamic dimension along the ranks, or None for shapes of another form."""
        matched: dict[str, tuple[int, ...]] = {}
        for number, (wanted, actual) in enumerate(zip(self.shapes, call.shapes, strict=True)):
            for dim, (want, size) in enumerate(zip(wanted, actual, strict=True)):
                if not isinstance(want, Dim):
                    if want != size or (number, dim) in call.uneven:
                        return None
                    continue
                each = call.rows[number, dim] if want.rows else (size,)
                small = size < SMALLEST_DYNAMIC and (number, dim) not in call.uneven
                if small or matched.setdefault(want.name, each) != each:
                    return None
        return matched

    def refuting(self, sizes: Mapping[str, tuple[int, ...]]) -> SizeGuard | None:
        """Return a condition that does not hold for sizes of the dynamic dimensions, or None."""
        totals = {name: sum(each) for name, each in sizes.items()}
        return next((guard for guard in self.guards if not guard.holds(totals)), None)

    def names_of(self, symbols: Collection[str], inputs: Sequence[str]) -> str:
        """Return the dimensions that symbols stand for in messages, each by the first input that has it."""
        places: dict[str, str] = {}
        for name, shape in zip(inputs, self.shapes, strict=True):
            for dim, size in enumerate(shape):
                if isinstance(size, Dim) and size.name in symbols:
                    places.setdefault(size.name, f"dimension {dim} of {name} ({size.name})")
        return " and ".join(places.values())

    def grown(self, sizes: Mapping[str, tuple[int, ...]]) -> Variant:
        """Return this variant with the largest sizes after a call of these sizes."""
        if all(dim.holds(sizes[dim.name]) for dim in self.dims):
            return self

        def grown(size: int | Dim) -> int | Dim:
            return size.grown(sizes[size.name]) if isinstance(size, Dim) else size

        return replace(self, shapes=tuple(tuple(map(grown, shape)) for shape in self.shapes))


@dataclass(frozen=True)
class SizeChange:
    """The cause of a further compilation for sizes.

    Attributes:
        dims: the dimensions, for messages.
        reason: why no symbol stands for all their sizes.
        place: the user's line and its code, or empty.
    """

    dims: str
    reason: str
    place: str = ""


def _change(variants: Sequence[Variant], names: Sequence[str], call: _Sizes, static: str | None) -> SizeChange | None:
    """Return why none of the variants serves a call; None where a further dimension has become dynamic.

    Args:
        static: why all dimensions are static; None if they are not.
    """
    for variant in reversed(variants):
        sizes = variant.matched(call)
        guard = None if sizes is None else variant.refuting(sizes)
        if guard is not None:
            place = f"{guard.line}   {guard.code}" if guard.line else ""
            need = "build() needs it as a Python number" if guard.fixes else "build() decides by it"
            return SizeChange(variant.names_of(guard.symbols, names), f"{need} ({guard.condition})", place)
    if static is None or not variants:
        return None
    changed = [
        f"dimension {dim} of {name}"
        for name, old, new in zip(names, variants[-1].shapes, call.shapes, strict=True)
        for dim, (before, after) in enumerate(zip(old, new, strict=True))
        if before != after
    ]
    return SizeChange(" and ".join(changed), static)


# Inputs without their sizes and marks (``Batch.pattern()``), and ``config.dynamic_shapes``.
Kind = tuple[Hashable, Mode]


@dataclass
class _History:
    """The sizes of inputs of one kind so far, and the variants of their step."""

    first: Shapes | None = None
    dynamic: set[Where] = field(default_factory=set)
    limits: dict[Where, tuple[int, int | None]] = field(default_factory=dict)
    largest: dict[Where, int] = field(default_factory=dict)
    # The most rows of one rank.
    largest_part: dict[Where, int] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    # Why a variant beyond those before it is needed, by number.
    changes: dict[int, SizeChange] = field(default_factory=dict)
    # Why no step with dynamic dimensions can be compiled.
    refused: str | None = None
    # What calls with the same sizes on all ranks, and the same marks, selected before.
    selected: dict[
        tuple[tuple[tuple[int, ...], ...], Hashable],
        tuple[tuple[TensorSpec, ...], Mapping[str, tuple[int, ...]], int],
    ] = field(default_factory=dict)

    def needs_equal_rows(self, mode: Mode) -> str | None:
        """Return why all ranks and micro-batches must hold equally many rows; None if they need not."""
        if mode is False:
            return (
                "config.dynamic_shapes is False, config.virtual_ranks is set, or config.backend is a function, which "
                "gets a graph of one size"
            )
        return self.refused and f"the step has equal parts only: {self.refused}"

    def note(self, batch: Batch, call: _Sizes, mode: Mode) -> None:
        """Note the sizes of a call, and which dimensions they make dynamic.

        Raises:
            InputError: a size is outside of the limits that the user declared.
        """
        shapes, parts = call.shapes, call.parts
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
        if call.uneven:
            self.dynamic.update((number, 0) for number in parts)

    def select(
        self, batch: Batch, call: _Sizes, mesh: Mesh, mode: Mode, taken: Collection[int]
    ) -> tuple[Variant, dict[str, tuple[int, ...]]]:
        """Return the variant that serves these sizes, a new one if there is none, and the sizes of its dimensions.

        Raises:
            InputError: rows must be equal and are not, or a size is outside of the limits that the user declared.
        """
        if self.refused is None and split_sequences(batch.sbp):
            self.refused = "ranks split another dimension of an input than 0"
        reason = self.needs_equal_rows(mode)
        if call.uneven and reason is not None:
            raise InputError(_unequal(batch, call, reason))
        self.note(batch, call, mode)
        if self.refused is not None:
            self.dynamic.clear()
        for at, variant in enumerate(self.variants):
            sizes = variant.matched(call)
            if sizes is not None and variant.refuting(sizes) is None:
                self.variants[at] = variant.grown(sizes)
                return self.variants[at], sizes
        variant = Variant(_symbolic(self, batch, call, mesh, taken), next(self.numbers))
        if (change := _change(self.variants, batch.names, call, reason)) is not None:
            self.changes[variant.number] = change
        self.variants.append(variant)
        sizes = variant.matched(call)
        assert sizes is not None
        return variant, sizes


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
        grid: Any,
        taken: Callable[[], Collection[int]],
    ) -> Batch:
        """Return the batch with its global shapes, from the sizes of all ranks.

        Args:
            batch: as :func:`zerograph.compiler.batch.read_batch` read it on this rank.
            kind: the kind of its inputs.
            everybody: for each rank what :func:`local_sizes` returned there.
            mesh: the ranks.
            grid: their numbers as a nested list, one level for each mesh dimension.
            taken: returns sizes of the model, which dynamic dimensions are not traced with.

        Raises:
            InputError: on all ranks alike: the ranks' inputs do not make one batch.
        """
        history = self._kinds[kind]
        key = tuple(map(tuple, everybody)), batch.marks
        if key not in history.selected:
            if len(history.selected) >= _MAX_SELECTED:
                history.selected.clear()
            call = _sizes(batch, everybody, mesh, grid)
            variant, sizes = history.select(batch, call, mesh, kind[1], taken())
            specs = tuple(replace(spec, shape=one) for spec, one in zip(batch.specs, variant.shapes, strict=True))
            history.selected[key] = specs, sizes, variant.number
        return batch.resolved(*history.selected[key])

    def add_guards(self, kind: Kind, variant: int, guards: Sequence[SizeGuard]) -> None:
        """Note what the captured graph of a variant relies on: other sizes select another variant."""
        history = self._kinds[kind]
        if guards:
            history.variants = [
                replace(one, guards=tuple(guards)) if one.number == variant else one for one in history.variants
            ]
            history.selected.clear()

    def change(self, kind: Kind, variant: int) -> SizeChange | None:
        """Return what about its sizes called for a variant beyond those before it; None if nothing that will go on."""
        return self._kinds[kind].changes.get(variant)

    def refuse(self, kind: Kind, reason: str) -> None:
        """Select static sizes only from now on, since a step with dynamic dimensions could not be compiled."""
        history = self._kinds[kind]
        history.refused = reason
        history.variants = [variant for variant in history.variants if not variant.dims]
        history.selected.clear()


def _sizes(batch: Batch, everybody: Sequence[Sequence[int]], mesh: Mesh, grid: Any) -> _Sizes:
    """Return the sizes of a call.

    Raises:
        InputError: no rank has rows, ranks differ in another dimension, or those that hold the same part in rows.
    """
    shapes = [tuple(size for size in spec.shape if isinstance(size, int)) for spec in batch.specs]
    rows, parts, at = dict[Where, tuple[int, ...]](), dict[int, tuple[int, ...]](), 0
    for number in part_numbers(batch):
        dims = batch.tensors[number].dim()
        each = [tuple(sizes[at : at + dims]) for sizes in everybody]
        at += dims
        parts[number] = tuple(shape[0] for shape in each)
        by_rows = tuple(entry if entry == Split(0) else broadcast for entry in batch.sbp[number])
        lengths = _rows(replica_groups(grid, by_rows), each, batch.names[number])
        others = tuple(broadcast if entry == Split(0) else entry for entry in batch.sbp[number])
        shapes[number] = global_shape((sum(lengths), *_other_sizes(batch.names[number], each)), others, mesh)
        rows[number, 0] = lengths
    # Ranks hold unequal numbers of rows, or micro-batches do.
    uneven = {where for where, each in rows.items() if not _are_even(each, batch)}
    return _Sizes(shapes, rows, parts, uneven)


def _are_even(rows: Sequence[int], batch: Batch) -> bool:
    """Return whether all ranks have equal micro-batches."""
    if batch.slices is None or batch.slices % len(rows) == 0:
        return len(set(rows)) == 1 and rows[0] % batch.micro_batches == 0
    size, rest = divmod(sum(rows), batch.slices)
    return not rest and list(rows) == [count * size for count in slice_counts(batch.slices, len(rows))]


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

    Raises:
        InputError: they are not equal, or no rank has rows.
    """
    filled = {rank: shape for rank, shape in enumerate(each) if shape[0]}
    if (first := next(iter(filled), None)) is None:
        raise InputError(
            f"{name} has no rows on any rank\nStop when all ranks are out of data: zg.batches(loader) does."
        )
    for rank, shape in filled.items():
        if shape[1:] != filled[first][1:]:
            raise InputError(
                f"{name} has shape {each[first]} on rank {first} and {shape} on rank {rank}\n"
                "Ranks may hold any number of rows, but all other dimensions are equal: pad each batch to the "
                "longest sample of all ranks, or to a fixed length."
            )
    return filled[first][1:]


def _rows(groups: Sequence[Sequence[int]], each: Sequence[tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Return the rows of the parts that mesh dimensions make, in row-major order.

    Args:
        groups: for each part the ranks that hold it.
        each: shape of the input on each rank.
        name: the input, for messages.

    Raises:
        InputError: ranks that hold the same part differ.
    """
    for rank, *copies in groups:
        for other in copies:
            if each[rank][0] != each[other][0]:
                raise InputError(
                    f"{name} has {each[rank][0]} rows on rank {rank} and {each[other][0]} on rank {other}, but no "
                    "mesh dimension that splits the batch lies between them\nPass the same part on both ranks, or "
                    "split the batch along more dimensions of the placement (config.mesh.input_sbp)."
                )
    return tuple(each[rank][0] for rank, *_ in groups)


def _split_dims(batch: Batch, number: int, mesh: Mesh) -> list[int]:
    """Return the mesh dimensions of several ranks that split the rows of an input."""
    return [dim for dim, sbp in enumerate(batch.sbp[number]) if sbp == Split(0) and mesh.shape[dim] > 1]


def _unequal(batch: Batch, call: _Sizes, reason: str) -> str:
    """Return a message that ranks hold unequal parts, or parts that micro-batches do not divide."""
    first = min(number for number, _ in call.uneven)
    counts = call.parts[first]
    problem = (
        "ranks hold unequal numbers of rows"
        if len(set(counts)) > 1
        else f"{batch.cut_by} does not divide the number of rows"
    )
    if batch.slices is not None and batch.slices % len(counts):
        slices = ", ".join(map(str, slice_counts(batch.slices, len(counts))))
        problem = f"ranks have {slices} slices, not of equally many rows"
    shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
    return (
        f"{problem}, and {reason}: {batch.names[first]} has {shown}\n"
        "Use a loader with drop_last=True, or pad the smaller parts. Pass a tensor that is not part of the batch as "
        "zg.replicated(x)."
    )


def _symbolic(
    history: _History, batch: Batch, call: _Sizes, mesh: Mesh, taken: Collection[int]
) -> tuple[tuple[int | Dim, ...], ...]:
    """Return the shapes with symbols in place of dynamic dimensions; equal sizes share one."""
    primes, shapes, rows = _primes(set(taken)), call.shapes, call.rows
    dims: dict[Hashable, Dim] = {}
    identities: dict[Where, Hashable] = {}
    for number, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            where = number, dim
            if where not in history.dynamic or (size < SMALLEST_DYNAMIC and where not in call.uneven):
                continue
            identities[where] = identity = where in rows, rows.get(where, size)
            if identity not in dims:
                micro_batches = batch.micro_batches if where in rows else 1
                pieces = len(rows[where]) * micro_batches if where in rows else 1
                along = _split_dims(batch, number, mesh) if where in rows else []
                dims[identity] = Dim(
                    f"s{len(dims)}",
                    primes(size // pieces) * pieces,
                    rows=where in rows,
                    pieces=pieces,
                    # Time is the mesh dimension after those of ranks.
                    along=(*along, mesh.dims) if micro_batches > 1 else tuple(along),
                    micro_batches=micro_batches,
                    largest=history.largest[where],
                    largest_part=history.largest_part[where],
                )
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
    """Return a function that returns an unused prime near a size, which divides no size in ``taken``.

    It is at most the size if that is large enough: a table of positions may end at the size.
    """

    def is_free(number: int) -> bool:
        prime = all(number % factor for factor in range(2, math.isqrt(number) + 1))
        return prime and not any(size and size % number == 0 for size in taken)

    def near(size: int) -> int:
        sizes = itertools.chain(range(size, _SMALLEST_HINT - 1, -1), itertools.count(max(size, _SMALLEST_HINT)))
        taken.add(prime := next(filter(is_free, sizes)))
        return prime

    return near
