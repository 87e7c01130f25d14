"""The graph in the forms that others read: networkx, and Graphviz's DOT and SVG."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from zerograph.errors import ConfigError
from zerograph.inspection.names import close_to, within
from zerograph.inspection.nodes import Edge, NodeFacts, facts
from zerograph.passes.context import Context

if TYPE_CHECKING:
    import networkx

# Graphviz lays out some thousand nodes in minutes.
_SVG_SECONDS = 300


def to_networkx(graph: fx.Graph, context: Context) -> networkx.MultiDiGraph[str]:
    """A graph whose nodes have the attributes of :class:`zerograph.inspection.nodes.NodeFacts`.

    Nodes go by ``id``. An edge leads from a node to one that reads its value, and has ``argument``, the number of the
    value among those that the reader reads. What enters a loop leads to the loop and to the input of its body.
    """
    import networkx

    nodes, edges = facts(graph, context)
    made: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    made.add_nodes_from((one.id, one.as_dict()) for one in nodes)
    made.add_edges_from((one.source, one.target, {"argument": one.argument}) for one in edges)
    return made


def to_graphviz(
    graph: fx.Graph, context: Context, module: str | None = None, svg: str | os.PathLike[str] | None = None
) -> str:
    """The graph in DOT, or a module's part with what enters and leaves it; drawn into a file if one is given.

    Raises:
        ConfigError: no node belongs to the module; no ``dot`` on this machine, or it failed.
    """
    nodes, edges = facts(graph, context)
    inside = {one.id for one in nodes if module is None or within(one.module or one.parameter, module)}
    if module is not None and not inside:
        known = {one.module for one in nodes if one.module}
        raise ConfigError(f"no node of this graph belongs to the module {module!r}{close_to(module, known)}")
    text = _dot(nodes, edges, inside, module or "step")
    if svg is not None:
        _draw(text, Path(svg))
    return text


_COLOURS = {"boxing": "#f4a261", "wait": "#fbe3cb", "input": "#d9e8d2", "loop": "#d8d0ea", "output": "#d9e8d2"}
_SBP_COLOURS = {"B": "#dbe7f5", "P": "#f7d4d8"}
_SPLIT_COLOUR = "#d5eef0"


def _dot(nodes: Sequence[NodeFacts], edges: Sequence[Edge], inside: set[str], name: str) -> str:
    known = {one.id: one for one in nodes}
    shown = [one for one in edges if one.source in inside or one.target in inside]
    # What enters and leaves stands at the border, as small text.
    border = dict.fromkeys(end for one in shown for end in (one.source, one.target) if end not in inside)
    lines = [
        f"digraph {_quoted(name)} {{",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10, margin="0.08,0.04"];',
        '  edge [color="#666666", arrowsize=0.6];',
        '  graph [fontname="Helvetica", labeljust=l];',
    ]
    members: dict[str, list[NodeFacts]] = {}
    for one in nodes:
        if one.id in inside:
            members.setdefault(one.module, []).append(one)
    around = {module: _around(module, members) for module in members if module}
    for module in members:
        if around.get(module) is None:
            lines += _cluster(module, members, around, "  ")
    lines += [
        f"  {_quoted(one)} [shape=plaintext, style=solid, fontsize=9, label={_quoted(known[one].label)}];"
        for one in border
    ]
    lines += [f"  {_quoted(one.source)} -> {_quoted(one.target)};" for one in shown]
    return "\n".join([*lines, "}"])


def _around(module: str, modules: Iterable[str]) -> str | None:
    """The innermost of these modules that holds another."""
    return max((one for one in modules if one and one != module and within(module, one)), key=len, default=None)


def _cluster(
    module: str, members: Mapping[str, Sequence[NodeFacts]], around: Mapping[str, str | None], indent: str
) -> Iterator[str]:
    """A frame around the nodes of a module, and around the frames of those within it; what has no module has none."""
    inner = f"{indent}  " if module else indent
    if module:
        name = _quoted(f"cluster {module}")
        yield f'{indent}subgraph {name} {{ label={_quoted(module)}; color="#999999"; fontsize=11;'
    yield from (f"{inner}{_quoted(one.id)} [{_style(one)}];" for one in members[module])
    for child, parent in around.items():
        if parent == module and module:
            yield from _cluster(child, members, around, inner)
    if module:
        yield f"{indent}}}"


def _style(one: NodeFacts) -> str:
    what = f"{one.boxing} of {one.tensor}" if one.boxing else one.operator
    shape = one.shape if one.shape == one.local_shape else f"{one.shape} -> {one.local_shape}"
    label = "\n".join(filter(None, (f"{one.id}: {what}", f"{one.dtype} {one.sbp} {shape}".strip())))
    colour = _COLOURS.get(one.kind) or _SBP_COLOURS.get(one.sbp, _SPLIT_COLOUR if one.sbp else "#ffffff")
    tooltip = _quoted(f"{one.phase} {one.source} {one.code}".strip())
    width = ", penwidth=2" if one.kind == "boxing" else ""
    return f'label={_quoted(label)}, fillcolor="{colour}", tooltip={tooltip}{width}'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _draw(text: str, path: Path) -> None:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be drawn: {path.parent} is no folder that can be written")
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            f"{path} is to be drawn by Graphviz, whose program 'dot' is not on this machine\n"
            "Install Graphviz (apt install graphviz), or leave svg out and draw the returned text elsewhere."
        )
    # Under another name until it is whole.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "graph.svg"
        try:
            found = subprocess.run(
                [program, "-Tsvg", "-o", str(made)],
                input=text,
                text=True,
                capture_output=True,
                timeout=_SVG_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"dot did not draw {path} within {_SVG_SECONDS} seconds: ask for the part of one module"
            ) from None
        if found.returncode:
            raise ConfigError(f"dot could not draw {path}: {found.stderr.strip()}")
        made.replace(path)
