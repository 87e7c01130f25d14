"""Symbolic sizes: dimensions of inputs whose size differs between calls, and what graphs compute from them.

A step with dynamic dimensions is traced over ``torch.SymInt`` sizes, as ``torch.compile`` does. A *row dimension* is
dimension 0 of plain inputs: each rank holds any number of its rows. The rows of this rank, where they begin, and the
rows of every other rank are symbols of their own. A tensor that is split along a row dimension has a local size, in
which this rank's rows replace the global number of rows.

Several mesh dimensions may split the rows one after another: the symbols of a later one divide the part that the
earlier ones make. With micro-batches the last one is time, and its symbols have values of their own in each
micro-batch, which the loop computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from zerograph import _torch
from zerograph.base.source import running_line
from zerograph.errors import VerificationError
from zerograph.ir.dims import Dim, Size, SizeGuard, SizeInput
from zerograph.ir.metadata import origin

_PartKind = Literal["rows", "start", "of"]
# Types of symbolic numbers among the arguments of a node.
SYMBOLIC = (torch.SymInt, torch.SymFloat)


class Sizes:
    """The symbols of one captured step.

    Attributes:
        dims: the dynamic dimensions, by name.
        inputs: what each symbol stands for, by the symbol's name.
        guards: conditions on sizes that the trace relied on.
    """

    def __init__(self, environment: _torch.SizeEnv, dims: Iterable[Dim]) -> None:
        self.dims = {dim.name: dim for dim in dims}
        self.inputs: dict[str, SizeInput] = {}
        self.guards: tuple[SizeGuard, ...] = ()
        self._symbols: dict[SizeInput, torch.SymInt] = {}
        self._largest: dict[Any, int] = {}
        self._evaluated: dict[Any, int] = {}
        # A static step must not refer to its environment: the cycle would keep its fake tensors alive for longer.
        if self.dims:
            self._environment = environment
            environment.sizes, environment.on_guard, environment.on_question = self, self._guard, self._question
        for dim in self.dims.values():
            self._symbol(SizeInput(dim.name, "all"), dim.name, dim.hint, minimum=2)

    @classmethod
    def restored(
        cls,
        environment: _torch.SizeEnv,
        dims: Iterable[Dim],
        described: Mapping[str, tuple[SizeInput, int]],
        guards: tuple[SizeGuard, ...],
    ) -> Sizes:
        """Return the symbols of a captured step that was read from a file; see :meth:`described`."""
        sizes = cls(environment, dims)
        for name, (wanted, hint) in described.items():
            if name not in sizes.inputs:
                sizes._symbol(wanted, name, hint, minimum=0 if wanted.kind in ("start", "position") else 2)
        sizes.guards = guards
        sizes.close()
        return sizes

    def described(self) -> dict[str, tuple[SizeInput, int]]:
        """Return what each symbol stands for, and the value that it is traced with, by name."""
        return {name: (wanted, _torch.size_hint(self._symbols[wanted])) for name, wanted in self.inputs.items()}

    def _guard(self, condition: Any) -> None:
        self._add(condition, running_line(optimizers=True))

    def _add(self, condition: Any, line: tuple[str, str]) -> None:
        text, symbols = _torch.condition_text(condition), frozenset(_torch.symbols_of(condition))
        guard = SizeGuard(text, symbols, *line, fixes=_torch.is_equality(condition) and len(symbols) == 1)
        if guard.symbols <= self.dims.keys() and all(guard.condition != one.condition for one in self.guards):
            self.guards = (*self.guards, guard)

    def _question(self, condition: Any, answer: bool) -> None:
        if self.is_special_for_one_row(condition):
            self._guard(condition if answer else _torch.negated(condition))

    def is_special_for_one_row(self, condition: Any) -> bool:
        """Return whether a condition on global sizes is another one if a row dimension has one row only.

        Torch's shape functions take sizes for at least 2, so conditions on one row are no guards by themselves.
        """
        hints = {dim.name: dim.hint for dim in self.dims.values()}
        if not set(_torch.symbols_of(condition)) <= self.dims.keys():
            return False
        answer = _torch.condition_holds(condition, hints)
        return any(
            dim.rows and _torch.condition_holds(condition, {**hints, dim.name: 1}) != answer
            for dim in self.dims.values()
        )

    def guard_squeezes(self, graph: fx.Graph) -> None:
        """Record that a squeeze keeps a dimension: for one row it would drop it."""
        for node in graph.nodes if self.dims else ():
            if node.target not in _SQUEEZES:
                continue
            shape = node.args[0].meta["val"].shape
            dims = node.args[1] if len(node.args) > 1 else range(len(shape))
            for dim in [dims] if isinstance(dims, int) else dims:
                if shape and not isinstance(shape[dim], int):
                    kept = _torch.differs_from_one(shape[dim])
                    if self.is_special_for_one_row(kept):
                        self._add(kept, (origin(node).source, origin(node).code))

    def close(self) -> None:
        """Record no further guards: the graph is captured."""
        if self.dims:
            self._environment.closed = True
            self._environment.on_guard = self._environment.on_question = None

    def all(self, dim: str) -> torch.SymInt:
        """Return the global size of a dimension."""
        return self._symbols[SizeInput(dim, "all")]

    def concrete(self, shape: Sequence[int | Dim]) -> tuple[Size, ...]:
        """Return a shape with symbols in place of its dynamic dimensions."""
        return tuple(self.all(one.name) if isinstance(one, Dim) else one for one in shape)

    def divides(self, size: torch.SymInt, ranks: int, mesh_dim: int | None = None) -> bool:
        """Return whether ranks can split a dimension of this size: by rows, or in equal parts.

        Args:
            size: what the ranks along the mesh dimension hold together.
            ranks: number of ranks along it.
            mesh_dim: the mesh dimension; None for any that splits rows.
        """
        rows = self._rows_in(size)
        if rows is None:
            return _torch.coefficient(size) % ranks == 0
        dim, level = rows
        return mesh_dim is None or dim.along[level : level + 1] == (mesh_dim,)

    def part(self, size: torch.SymInt, ranks: int, mesh_dim: int) -> Size:
        """Return this rank's part of a dimension of size ``size`` that is split over the ranks of a mesh dimension."""
        if ranks == 1:
            return size
        if not self.divides(size, ranks, mesh_dim):
            raise VerificationError(f"a dimension of size {size} cannot be split along mesh dimension {mesh_dim}")
        if not self.is_rows(size):
            quotient: Size = size // ranks
            return quotient
        return self._of_rows(size, ranks, "rows")

    def start(self, size: torch.SymInt, ranks: int, mesh_dim: int) -> Size:
        """Return where this rank's part of such a dimension begins."""
        if ranks == 1:
            return 0
        if not self.is_rows(size):
            position = SizeInput("", "position", (mesh_dim,))
            if position not in self._symbols:
                self._symbol(position, f"s_position{mesh_dim}", 0, minimum=0)
            return self._symbols[position] * self.part(size, ranks, mesh_dim)
        return self._of_rows(size, ranks, "start")

    def parts(self, size: torch.SymInt, ranks: int, mesh_dim: int) -> list[Size]:
        """Return the part of each rank."""
        if not self.is_rows(size):
            return [self.part(size, ranks, mesh_dim)] * ranks
        return [self._of_rows(size, ranks, "of", place) for place in range(ranks)]

    def rows_before(self, part: SizeInput) -> torch.SymInt:
        """Return the number of rows that the last mesh dimension of ``part.along`` divides."""
        return self._level(self.dims[part.dim], len(part.along) - 1)

    def is_rows(self, size: Size) -> bool:
        """Return whether a size is a multiple of a number of rows, which ranks and micro-batches split unequally."""
        return self._rows_in(size) is not None

    def row_dim(self, size: Size) -> Dim | None:
        """Return the row dimension that a size is a multiple of; None for a size that is none."""
        rows = self._rows_in(size)
        return None if rows is None else rows[0]

    def _rows_in(self, size: Size) -> tuple[Dim, int] | None:
        """Return the row dimension that a size is a multiple of, and how many mesh dimensions split it already."""
        if isinstance(size, int):
            return None
        for dim in self.dims.values():
            for level in range(len(dim.along) + 1 if dim.rows else 0):
                if self._input(dim, level) in self._symbols and _torch.is_multiple(size, self._level(dim, level)):
                    return dim, level
        return None

    def _of_rows(self, size: torch.SymInt, ranks: int, kind: _PartKind, place: int = 0) -> torch.SymInt:
        rows = self._rows_in(size)
        assert rows is not None
        dim, level = rows
        whole, wanted = self._level(dim, level), self._input(dim, level + 1, kind, place)
        if wanted not in self._symbols:
            hint = 0 if kind == "start" else _torch.size_hint(whole) // ranks
            minimum = 0 if kind == "start" else 2
            if hint < minimum:
                # The hint is the number itself where the program asks whether the rows are so few.
                raise VerificationError(
                    f"what is computed depends on the batch having {_torch.size_hint(whole)} rows, too few for {ranks} "
                    "ranks"
                )
            self._symbol(wanted, _name(dim, wanted), hint, minimum=minimum)
        replaced: torch.SymInt = _torch.substitute(size, whole, self._symbols[wanted])
        return replaced

    def _level(self, dim: Dim, level: int) -> torch.SymInt:
        """Return the rows of the part that the first ``level`` mesh dimensions make."""
        return self._symbols[self._input(dim, level)]

    def _input(self, dim: Dim, level: int, kind: _PartKind = "rows", place: int = 0) -> SizeInput:
        if not level:
            return SizeInput(dim.name, "all")
        in_time = level == len(dim.along) and dim.micro_batches > 1
        return SizeInput(dim.name, kind, dim.along[:level], place, dim.micro_batches if in_time else 0)

    def symbol(self, name: str) -> torch.SymInt:
        """Return the symbol of a name."""
        return self._symbols[self.inputs[name]]

    def at(self, size: torch.SymInt, values: Mapping[str, int]) -> int:
        """Return a global size for values of the dynamic dimensions, by name."""
        return _torch.evaluate_size(size, {_torch.size_key(self.all(name)): value for name, value in values.items()})

    def largest(self, size: Size) -> int:
        """Return a size for the largest dimensions that were seen or declared."""
        if isinstance(size, int):
            return size
        key = _torch.size_key(size)
        if key not in self._evaluated:
            self._evaluated[key] = _torch.evaluate_size(size, self._largest)
        return self._evaluated[key]

    def predict_for(self, dims: Iterable[Dim]) -> None:
        """Predict memory for the largest sizes of these dimensions from now on."""
        for dim in dims:
            self.dims[dim.name] = replace(self.dims[dim.name], largest=dim.largest, largest_part=dim.largest_part)
        self._evaluated = {}
        self._largest = {_torch.size_key(symbol): self._largest_of(one) for one, symbol in self._symbols.items()}

    def largest_sizes(self) -> dict[str, int]:
        """Return the sizes that memory is predicted for, by symbol: global sizes, and the rows of ranks."""
        return {
            name: self._largest_of(one)
            for name, one in sorted(self.inputs.items())
            if one.kind == "all" or (one.kind == "rows" and not one.micro_batches)
        }

    def is_declared(self, name: str) -> bool:
        """Return whether the user declared the maximum of a symbol."""
        return self.dims[self.inputs[name].dim].declared

    def _largest_of(self, wanted: SizeInput) -> int:
        if wanted.kind in ("start", "position"):
            return 0
        dim = self.dims[wanted.dim]
        if wanted.micro_batches:
            return -(-self._largest_of(self._input(dim, len(dim.along) - 1)) // wanted.micro_batches)
        # The outer mesh dimensions of several make parts of several ranks.
        is_rank = len(wanted.along) == len(dim.along) - (dim.micro_batches > 1)
        largest = dim.largest_part if wanted.along and is_rank else dim.largest
        return largest or _torch.size_hint(self._symbols[wanted])

    def _symbol(self, wanted: SizeInput, name: str, hint: int, *, minimum: int) -> None:
        if not name.isidentifier():
            # Names are part of code that is generated, and may come from a file.
            raise ValueError(f"{name!r:.60} is no name of a size")
        symbol = _torch.new_size(self._environment, name, hint, minimum=minimum)
        self._symbols[wanted] = symbol
        self.inputs[name] = wanted
        self._largest[_torch.size_key(symbol)] = self._largest_of(wanted)


_SQUEEZES = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)


def _name(dim: Dim, part: SizeInput) -> str:
    """Return the name of the symbol of a part: ``s0_rows`` of this rank, ``s0_micro`` of a micro-batch of it."""
    suffix = f"of{part.place}" if part.kind == "of" else part.kind
    if part.micro_batches:
        return f"{dim.name}_micro{'' if part.kind == 'rows' else f'_{suffix}'}"
    is_last = len(part.along) == len(dim.along) - (dim.micro_batches > 1)
    return f"{dim.name}_{suffix}{'' if is_last else f'_along{part.along[-1]}'}"


def sizes_of(size: torch.SymInt) -> Sizes:
    """Return the symbols of the step that a symbolic size belongs to."""
    sizes: Sizes = size.node.shape_env.sizes
    return sizes


def inline_sizes(graph: fx.Graph) -> None:
    """Replace the nodes of a traced graph that compute sizes by the symbolic sizes themselves.

    Passes then see tensors only; the pass ``bind_sizes`` makes nodes of the sizes again.
    """
    for node in reversed(list(graph.nodes)):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SYMBOLIC):
            if not node.users:
                graph.erase_node(node)
                continue
            with _torch.raw_sizes():
                for user in list(node.users):
                    user.args, user.kwargs = _replaced(user.args, node, value), _replaced(user.kwargs, node, value)
            graph.erase_node(node)


def _replaced(arguments: Any, node: fx.Node, value: Any) -> Any:
    return fx.map_arg(arguments, lambda one: value if one is node else one)


def elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor; with dynamic dimensions, at the largest sizes seen or declared."""
    return largest((tensor.numel(),))[0]


def largest(shape: Iterable[Size]) -> tuple[int, ...]:
    """Return a shape at the largest sizes seen or declared."""
    return tuple(size if isinstance(size, int) else sizes_of(size).largest(size) for size in shape)


def hints(shape: Sequence[Size]) -> tuple[int, ...]:
    """Return a shape in the sizes that its step is traced with."""
    return tuple(map(_torch.size_hint, shape))


def graph_sizes(graph: fx.Graph) -> Sizes | None:
    """Return the symbols of a graph; None if no input has a dynamic dimension."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    sizes: Iterable[Size] = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return next((sizes_of(size) for size in sizes if isinstance(size, torch.SymInt)), None)
