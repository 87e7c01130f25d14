"""Positions of nodes: rows are modules and source lines, nested as in the model; columns are the phases of a step.

Everything expensive is computed here: the tree of rows, and the arrangement of nodes in each cell. A page only stacks
the rows that are open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerograph.inspection.report.records import (
    BACKWARD,
    FORWARD,
    INPUTS,
    NOWHERE,
    STATE,
    UPDATE,
    Interned,
    Nodes,
    Record,
    Where,
)

# Nodes of one layer side by side, at most.
WIDEST = 3

# Column and line of each node of a cell, from 0.
Cell = tuple[tuple[int, int], ...]


@dataclass
class Row:
    """A module, or a source line of one. Leaves hold nodes.

    Attributes:
        label: short text; ``title`` is the full text.
        parent: number of the enclosing row; -1 for none.
        kind: ``"module"``, ``"line"`` or ``"inputs"``.
        source: ``file:line`` of a source line.
    """

    label: str
    title: str
    parent: int
    kind: str
    source: str = ""


@dataclass
class Layout:
    """The picture of all passes.

    Attributes:
        rows: each after its parent, in drawing order.
        row_of: leaf row of each position, by number.
        cells: distinct arrangements of nodes.
        arranged: for each pass, number of the arrangement of the nodes in each (row, lane).
    """

    rows: Sequence[Row]
    row_of: Sequence[int]
    cells: Sequence[Cell]
    arranged: Sequence[Mapping[tuple[int, int], int]]


@dataclass
class _Module:
    path: str
    children: dict[str, _Module] = field(default_factory=dict)
    # Sources of lines, and names of modules, in the order of first use.
    order: dict[tuple[str, str], None] = field(default_factory=dict)
    has_loose: bool = False


def lay_out(nodes: Nodes, orders: Sequence[Sequence[int]]) -> Layout:
    """Compute rows and cells for every node of every pass."""
    wheres, records = nodes.wheres.items, nodes.records.items
    rows, row_of = _rows(nodes, [wheres[number] for number in _in_order(records, wheres, orders)], wheres)
    cells: Interned[Cell] = Interned()
    cache: dict[tuple[int, tuple[tuple[int, ...], ...]], int] = {}
    arranged = []
    for order in orders:
        content: dict[tuple[int, int], list[Record]] = {}
        for number in order:
            record = records[number]
            content.setdefault((row_of[record.where], wheres[record.where].lane), []).append(record)
        arrangement = {}
        for cell, members in content.items():
            edges = _edges(members)
            # In one column, edges pass beside the nodes.
            widest = WIDEST if cell[1] in (FORWARD, BACKWARD, UPDATE) else 1
            if (widest, edges) not in cache:
                cache[widest, edges] = cells(_arrange(edges, widest))
            arrangement[cell] = cache[widest, edges]
        arranged.append(arrangement)
    return Layout(rows, row_of, cells.items, arranged)


def _in_order(records: Sequence[Record], wheres: Sequence[Where], orders: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions in the order in which they run.

    A position that a later pass adds comes after its neighbour in that pass. Parameters come last.
    """
    result: list[int] = []
    seen: set[int] = set()
    for order in orders:
        new: dict[int, None] = {}
        # New positions by their predecessor; -1 for the beginning.
        followers: dict[int, list[int]] = {}
        previous = -1
        for number in order:
            where = records[number].where
            if where in seen:
                previous = where
            elif where not in new and wheres[where].lane != STATE:
                new[where] = None
                followers.setdefault(previous, []).append(where)
        result = [where for old in (-1, *result) for where in (old, *followers.get(old, ()))][1:]
        seen |= set(new)
    return [*result, *(number for number, where in enumerate(wheres) if where.lane == STATE)]


def _rows(nodes: Nodes, order: Sequence[Where], wheres: Sequence[Where]) -> tuple[list[Row], list[int]]:
    root = _Module("")
    special = dict.fromkeys(where.module for where in order if where.module in (INPUTS, NOWHERE))
    for where in order:
        if where.module in special:
            continue
        module = root
        for name in where.module.split(".") if where.module else ():
            module.order.setdefault(("module", name))
            module = module.children.setdefault(name, _Module(f"{module.path}.{name}" if module.path else name))
        if where.source:
            module.order.setdefault(("line", where.source))
        else:
            module.has_loose = True
    rows: list[Row] = []
    leaves: dict[tuple[str, str], int] = {}
    if INPUTS in special:
        leaves[INPUTS, ""] = len(rows)
        rows.append(Row("inputs", "inputs of the step besides parameters", -1, "inputs"))
    _add(root, -1, rows, leaves, nodes.code)
    if NOWHERE in special:
        leaves[NOWHERE, ""] = len(rows)
        rows.append(Row("the step", "nodes without module and source line", -1, "inputs"))
    return rows, [leaves[where.module, where.source] for where in wheres]


def _add(
    module: _Module, parent: int, rows: list[Row], leaves: dict[tuple[str, str], int], code: Mapping[str, str]
) -> None:
    lines = [name for kind, name in module.order if kind == "line"]
    # A module with one line and no children is shown as that line.
    alone = not module.children and len(lines) < 2 and parent != -1
    if alone:
        leaves[module.path, ""] = parent
        if lines:
            leaves[module.path, lines[0]] = parent
            rows[parent].source = lines[0]
        return
    if module.has_loose:
        leaves[module.path, ""] = len(rows)
        rows.append(Row("parameters", f"parameters of {module.path} itself", parent, "inputs"))
    for kind, name in module.order:
        number = len(rows)
        if kind == "line":
            leaves[module.path, name] = number
            rows.append(Row(code.get(name) or name, name, parent, "line", name))
        else:
            inner = module.children[name]
            # An item of a list is shown with the name of the list.
            rows.append(
                Row(".".join(inner.path.split(".")[-2:]) if name.isdigit() else name, inner.path, parent, "module")
            )
            _add(inner, number, rows, leaves, code)


def _edges(members: Sequence[Record]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each node's inputs among the members."""
    indices = {record.name: index for index, record in enumerate(members)}
    return tuple(tuple(indices[name] for name in record.inputs if name in indices) for record in members)


def _arrange(edges: Sequence[Sequence[int]], widest: int) -> Cell:
    """Return a layered drawing: each node below all of its inputs, and centred below them where possible."""
    depths: list[int] = []
    for inputs in edges:
        depths.append(1 + max((depths[source] for source in inputs if source < len(depths)), default=-1))
    layers: dict[int, list[int]] = {}
    for node, depth in enumerate(depths):
        layers.setdefault(depth, []).append(node)
    columns: dict[int, float] = {}
    positions: dict[int, tuple[int, int]] = {}
    line = 0
    for depth in sorted(layers):
        members = layers[depth]
        wanted = {
            node: sum(columns[source] for source in edges[node]) / len(edges[node]) if edges[node] else float(index)
            for index, node in enumerate(members)
        }
        members = sorted(members, key=lambda node: (wanted[node], node))
        for start in range(0, len(members), widest):
            part = members[start : start + widest]
            free = 0
            for index, node in enumerate(part):
                column = max(free, min(round(wanted[node]), widest - len(part) + index))
                columns[node] = column
                positions[node] = (column, line)
                free = column + 1
            line += 1
    return tuple(positions[node] for node in range(len(edges)))
