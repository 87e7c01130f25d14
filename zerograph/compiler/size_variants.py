"""The forms of the sizes of a graph's inputs, one step for each, and why a further form is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from zerograph.ir.dims import SMALLEST_DYNAMIC, Dim, SizeGuard

# Number of an input, and one of its dimensions.
Where = tuple[int, int]
Shapes = Sequence[Sequence[int]]


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

    def sizes(
        self, rows: Mapping[Where, tuple[int, ...]], shapes: Shapes, uneven: Collection[Where]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the sizes of each dynamic dimension along the ranks, or None if it does not serve these shapes.

        Args:
            rows: the rows of each part.
            shapes: the global shapes.
            uneven: dimensions whose rows ranks or micro-batches split unequally.
        """
        found = self._matched(rows, shapes, uneven)
        return None if found is None or self.refuting(found) is not None else found

    def refuting(self, found: Mapping[str, tuple[int, ...]]) -> SizeGuard | None:
        """Return a condition that does not hold for sizes of the dynamic dimensions, or None."""
        totals = {name: sum(each) for name, each in found.items()}
        return next((guard for guard in self.guards if not guard.holds(totals)), None)

    def refusing(
        self, rows: Mapping[Where, tuple[int, ...]], shapes: Shapes, uneven: Collection[Where]
    ) -> SizeGuard | None:
        """Return the condition that keeps it from serving shapes of its form; None for shapes of another form."""
        found = self._matched(rows, shapes, uneven)
        return None if found is None else self.refuting(found)

    def _matched(
        self, rows: Mapping[Where, tuple[int, ...]], shapes: Shapes, uneven: Collection[Where]
    ) -> dict[str, tuple[int, ...]] | None:
        found: dict[str, tuple[int, ...]] = {}
        for number, (wanted, actual) in enumerate(zip(self.shapes, shapes, strict=True)):
            for dim, (want, size) in enumerate(zip(wanted, actual, strict=True)):
                if not isinstance(want, Dim):
                    if want != size or (number, dim) in uneven:
                        return None
                    continue
                each = rows[number, dim] if want.rows else (size,)
                small = size < SMALLEST_DYNAMIC and (number, dim) not in uneven
                if small or found.setdefault(want.name, each) != each:
                    return None
        return found

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
        dims = {size for shape in self.shapes for size in shape if isinstance(size, Dim)}
        if all(dim.holds(sizes[dim.name]) for dim in dims):
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


def size_change(
    variants: Sequence[Variant],
    names: Sequence[str],
    rows: Mapping[Where, tuple[int, ...]],
    shapes: Shapes,
    uneven: Collection[Where],
    static: str | None,
) -> SizeChange | None:
    """Return why none of the variants serves these shapes; None where a further dimension has become dynamic.

    Args:
        variants: those so far, oldest first.
        names: names of the inputs.
        rows, shapes, uneven: as for :meth:`Variant.sizes`.
        static: why all dimensions are static; None if they are not.
    """
    for variant in reversed(variants):
        guard = variant.refusing(rows, shapes, uneven)
        if guard is not None:
            place = f"{guard.line}   {guard.code}" if guard.line else ""
            need = "build() needs it as a Python number" if guard.fixes else "build() decides by it"
            return SizeChange(variant.names_of(guard.symbols, names), f"{need} ({guard.condition})", place)
    if static is None or not variants:
        return None
    before = variants[-1].shapes
    changed = [
        f"dimension {dim} of {name}"
        for name, old, new in zip(names, before, shapes, strict=True)
        for dim, sizes in enumerate(zip(old, new, strict=True))
        if sizes[0] != sizes[1]
    ]
    return SizeChange(" and ".join(changed), static)
