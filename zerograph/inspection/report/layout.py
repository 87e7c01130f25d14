"""Where nodes stand: rows are modules and source lines, as the model nests them; columns are the phases of a step.

Everything that costs time is computed here: the tree of rows, and how the nodes of each cell lie in it. A page only
piles up the rows that are open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerograph.inspection.report.data import (
    BACKWARD,
    FORWARD,
    INPUTS,
    NOWHERE,
    REST,
    UPDATE,
    Nodes,
    Pass,
    Record,
    Where,
)
from zerograph.inspection.report.intern import Interned

# Nodes of one layer that stand beside each other at most.
WIDEST = 3

# Of each node of a cell: column and line, both from 0.
Cell = tuple[tuple[int, int], ...]


@dataclass
class Row:
    """A module, or a source line of one. Leaves hold nodes.

    Attributes:
        label, title: what is shown, and all of it.
        parent: number of the row around it; -1 for none.
        kind: ``"module"``, ``"line"`` or ``"inputs"``.
        source: of a line.
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
        rows: each behind its parent, in the order in which they are drawn.
        row_of: by the number of a place, the leaf that it belongs to.
        cells: distinct arrangements of nodes.
        arranged: for each pass, by (row, lane) the number of the arrangement of its nodes, in the order they run.
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


def lay_out(nodes: Nodes, passes: Sequence[Pass]) -> Layout:
    """Rows and cells for every node of every pass."""
    wheres, records = nodes.wheres.items, nodes.records.items
    rows, row_of = _rows(nodes, [wheres[number] for number in _in_order(records, wheres, passes)], wheres)
    cells: Interned[Cell] = Interned()
    known: dict[tuple[int, tuple[tuple[int, ...], ...]], int] = {}
    arranged = []
    for one in passes:
        content: dict[tuple[int, int], list[Record]] = {}
        for number in one.records:
            record = records[number]
            content.setdefault((row_of[record.where], wheres[record.where].lane), []).append(record)
        found = {}
        for place, members in content.items():
            edges = _edges(members)
            # Past what stands one below the other edges need not go through anything.
            widest = WIDEST if place[1] in (FORWARD, BACKWARD, UPDATE) else 1
            if (widest, edges) not in known:
                known[widest, edges] = cells(_arrange(edges, widest))
            found[place] = known[widest, edges]
        arranged.append(found)
    return Layout(rows, row_of, cells.items, arranged)


def _in_order(records: Sequence[Record], wheres: Sequence[Where], passes: Sequence[Pass]) -> list[int]:
    """Places of the nodes, in the order in which a reader expects them: each behind what runs before it.

    What a later pass brings stands behind its neighbour there. Parameters, which are given in any order, come last.
    """
    order: list[int] = []
    known: set[int] = set()
    for one in passes:
        new: dict[int, None] = {}
        # By what they follow; -1 for the beginning.
        behind: dict[int, list[int]] = {}
        previous = -1
        for number in one.records:
            where = records[number].where
            if where in known:
                previous = where
            elif where not in new and wheres[where].lane != REST:
                new[where] = None
                behind.setdefault(previous, []).append(where)
        order = [where for old in (-1, *order) for where in (old, *behind.get(old, ()))][1:]
        known |= set(new)
    return [*order, *(number for number, where in enumerate(wheres) if where.lane == REST)]


def _rows(nodes: Nodes, order: Sequence[Where], wheres: Sequence[Where]) -> tuple[list[Row], list[int]]:
    root = _Module("")
    special = dict.fromkeys(where.module for where in order if where.module in (INPUTS, NOWHERE))
    for where in order:
        if where.module in special:
            continue
        at = root
        for name in where.module.split(".") if where.module else ():
            at.order.setdefault(("module", name))
            at = at.children.setdefault(name, _Module(f"{at.path}.{name}" if at.path else name))
        if where.source:
            at.order.setdefault(("line", where.source))
        else:
            at.has_loose = True
    rows: list[Row] = []
    leaves: dict[tuple[str, str], int] = {}
    if INPUTS in special:
        leaves[INPUTS, ""] = len(rows)
        rows.append(Row("inputs", "what enters the step beside parameters", -1, "inputs"))
    _add(root, -1, rows, leaves, nodes.code)
    if NOWHERE in special:
        leaves[NOWHERE, ""] = len(rows)
        rows.append(Row("the step", "what belongs to no module and no line", -1, "inputs"))
    return rows, [leaves[where.module, where.source] for where in wheres]


def _add(
    module: _Module, parent: int, rows: list[Row], leaves: dict[tuple[str, str], int], code: Mapping[str, str]
) -> None:
    lines = [name for kind, name in module.order if kind == "line"]
    # A module with nothing but one line is that line.
    alone = not module.children and len(lines) < 2 and parent != -1
    if alone:
        leaves[module.path, ""] = parent
        if lines:
            leaves[module.path, lines[0]] = parent
            rows[parent].source = lines[0]
        return
    if module.has_loose:
        leaves[module.path, ""] = len(rows)
        rows.append(Row("parameters", f"what is {module.path}'s own", parent, "inputs"))
    for kind, name in module.order:
        number = len(rows)
        if kind == "line":
            leaves[module.path, name] = number
            rows.append(Row(code.get(name) or name, name, parent, "line", name))
        else:
            inner = module.children[name]
            # One of a list is called after the list: a number alone says little.
            rows.append(
                Row(".".join(inner.path.split(".")[-2:]) if name.isdigit() else name, inner.path, parent, "module")
            )
            _add(inner, number, rows, leaves, code)


def _edges(members: Sequence[Record]) -> tuple[tuple[int, ...], ...]:
    """For each node the places of those that it reads, among the members."""
    places = {record.name: place for place, record in enumerate(members)}
    return tuple(tuple(places[name] for name in record.inputs if name in places) for record in members)


def _arrange(edges: Sequence[Sequence[int]], widest: int) -> Cell:
    """A layered drawing: each node below all that it reads, and in the middle of them where that is free."""
    depths: list[int] = []
    for inputs in edges:
        depths.append(1 + max((depths[one] for one in inputs if one < len(depths)), default=-1))
    layers: dict[int, list[int]] = {}
    for node, depth in enumerate(depths):
        layers.setdefault(depth, []).append(node)
    columns: dict[int, float] = {}
    found: dict[int, tuple[int, int]] = {}
    line = 0
    for depth in sorted(layers):
        members = layers[depth]
        wanted = {
            node: sum(columns[one] for one in edges[node]) / len(edges[node]) if edges[node] else float(place)
            for place, node in enumerate(members)
        }
        members = sorted(members, key=lambda node: (wanted[node], node))
        for start in range(0, len(members), widest):
            part = members[start : start + widest]
            free = 0
            for place, node in enumerate(part):
                column = max(free, min(round(wanted[node]), widest - len(part) + place))
                columns[node] = column
                found[node] = (column, line)
                free = column + 1
            line += 1
    return tuple(found[node] for node in range(len(edges)))
