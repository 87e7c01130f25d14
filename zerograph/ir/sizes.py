"""Symbolic sizes: dimensions of inputs whose size differs between calls, and what graphs compute from them.

A step with dynamic dimensions is traced over ``torch.SymInt`` sizes, as ``torch.compile`` does. A *row dimension* is
dimension 0 of plain inputs: each rank holds any number of its rows. The rows of this rank, where they begin, and the
rows of every other rank are symbols of their own. A tensor that is split along a row dimension has a local size, in
which this rank's rows replace the global number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zerograph import _torch
from zerograph.base.source import running_line
from zerograph.errors import VerificationError
from zerograph.ir.dims import Dim, SizeGuard, SizeInput

Size = int | torch.SymInt
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
            environment.sizes, environment.on_guard = self, self._guard
        for dim in self.dims.values():
            self._symbol(SizeInput(dim.name, "all"), dim.name, dim.hint, minimum=2)

    def _guard(self, condition: Any) -> None:
        guard = SizeGuard(
            _torch.condition_text(condition), frozenset(_torch.symbols_of(condition)), *running_line(optimizers=True)
        )
        if guard.symbols <= self.dims.keys() and all(guard.condition != one.condition for one in self.guards):
            self.guards = (*self.guards, guard)

    def close(self) -> None:
        """Record no further guards: the graph is captured."""
        if self.dims:
            self._environment.closed = True
            self._environment.on_guard = None

    def all(self, dim: str) -> torch.SymInt:
        """Return the global size of a dimension."""
        return self._symbols[SizeInput(dim, "all")]

    def concrete(self, shape: Sequence[int | Dim]) -> tuple[Size, ...]:
        """Return a shape with symbols in place of its dynamic dimensions."""
        return tuple(self.all(one.name) if isinstance(one, Dim) else one for one in shape)

    def divides(self, size: torch.SymInt, ranks: int) -> bool:
        """Return whether ranks can split a dimension of this global size: by rows, or in equal parts."""
        return self.row_dim(size) is not None or _torch.coefficient(size) % ranks == 0

    def part(self, size: torch.SymInt, ranks: int) -> Size:
        """Return this rank's part of a dimension of global size ``size`` that is split over ``ranks`` ranks."""
        dim = self.row_dim(size)
        if dim is None or ranks == 1:
            if not self.divides(size, ranks):
                raise VerificationError(f"a dimension of size {size} cannot be split over {ranks} ranks")
            quotient: Size = size // ranks
            return quotient
        return self._of_rows(size, dim, SizeInput(dim.name, "rows"), dim.hint // ranks, 2)

    def start(self, size: torch.SymInt, ranks: int, mesh_dim: int) -> Size:
        """Return where this rank's part of such a dimension begins, along a dimension of the mesh."""
        dim = self.row_dim(size)
        if ranks == 1:
            return 0
        if dim is None:
            position = SizeInput(str(mesh_dim), "position")
            if position not in self._symbols:
                self._symbol(position, f"s_position{mesh_dim}", 0, minimum=0)
            return self._symbols[position] * self.part(size, ranks)
        return self._of_rows(size, dim, SizeInput(dim.name, "start"), 0, 0)

    def parts(self, size: torch.SymInt, ranks: int) -> list[Size]:
        """Return the part of each rank."""
        dim = self.row_dim(size)
        if dim is None:
            return [self.part(size, ranks)] * ranks
        return [
            self._of_rows(size, dim, SizeInput(dim.name, "of", place), dim.hint // ranks, 2) for place in range(ranks)
        ]

    def _of_rows(self, size: torch.SymInt, dim: Dim, wanted: SizeInput, hint: int, minimum: int) -> torch.SymInt:
        if wanted not in self._symbols:
            suffix = f"of{wanted.place}" if wanted.kind == "of" else wanted.kind
            self._symbol(wanted, f"{dim.name}_{suffix}", hint, minimum=minimum)
        replaced: torch.SymInt = _torch.substitute(size, self.all(dim.name), self._symbols[wanted])
        return replaced

    def row_dim(self, size: Size) -> Dim | None:
        """Return the row dimension that a size is a multiple of; None for a size that ranks cannot split by rows."""
        if isinstance(size, int):
            return None
        for dim in self.dims.values():
            if dim.rows and _torch.is_multiple(size, self.all(dim.name)):
                return dim
        return None

    def symbol(self, name: str) -> torch.SymInt:
        """Return the symbol of a name."""
        return self._symbols[self.inputs[name]]

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
        """Return the sizes that memory is predicted for, by symbol: global sizes, and the rows of one rank."""
        return {
            name: self._largest_of(one)
            for name, one in sorted(self.inputs.items())
            if one.kind == "all" or (one.kind == "rows" and self.dims[one.dim].rows)
        }

    def is_declared(self, name: str) -> bool:
        """Return whether the user declared the maximum of a symbol."""
        return self.dims[self.inputs[name].dim].declared

    def _largest_of(self, wanted: SizeInput) -> int:
        if wanted.kind in ("start", "position"):
            return 0
        dim = self.dims[wanted.dim]
        return (dim.largest if wanted.kind == "all" else dim.largest_part) or _torch.size_hint(self._symbols[wanted])

    def _symbol(self, wanted: SizeInput, name: str, hint: int, *, minimum: int) -> None:
        symbol = _torch.new_size(self._environment, name, hint, minimum=minimum)
        self._symbols[wanted] = symbol
        self.inputs[name] = wanted
        self._largest[_torch.size_key(symbol)] = self._largest_of(wanted)


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


def has_symbolic_inputs(graph: fx.Graph) -> bool:
    """Return whether some input of the graph has a dynamic dimension."""
    return graph_sizes(graph) is not None
