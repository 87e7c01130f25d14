"""The graph for other programs: networkx, Graphviz's DOT and SVG, and TensorBoard's event files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from zerograph.compiler.compiled import RewrittenStep
from zerograph.errors import ConfigError, did_you_mean
from zerograph.inspection.names import within
from zerograph.inspection.nodes import Edge, NodeFacts, facts
from zerograph.inspection.summary import summary
from zerograph.passes.context import Context

if TYPE_CHECKING:
    import networkx

# Graphviz takes minutes for some thousand nodes.
_SVG_SECONDS = 300


def to_networkx(graph: fx.Graph, context: Context) -> networkx.MultiDiGraph[str]:
    """Return a graph whose nodes have the attributes of :class:`zerograph.inspection.nodes.NodeFacts`.

    Nodes are named by ``id``. An edge leads from a node to a reader of its value; its attribute ``argument`` is the
    value's number among the reader's inputs. An operand of a loop has edges to the loop and to the input of its body.
    """
    import networkx

    nodes, edges = facts(graph, context)
    exported: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    exported.add_nodes_from((node.id, node.as_dict()) for node in nodes)
    exported.add_edges_from((edge.source, edge.target, {"argument": edge.argument}) for edge in edges)
    return exported


def to_graphviz(
    graph: fx.Graph, context: Context, module: str | None = None, svg: str | os.PathLike[str] | None = None
) -> str:
    """Return the graph in DOT, or a module's part of it with its inputs and outputs.

    Args:
        svg: file to draw the graph into.

    Raises:
        ConfigError: no node belongs to the module; ``dot`` is not installed, or failed.
    """
    nodes, edges = facts(graph, context)
    inside = {node.id for node in nodes if module is None or within(node.module or node.parameter, module)}
    if module is not None and not inside:
        modules = {node.module for node in nodes if node.module}
        raise ConfigError(f"no node of this graph belongs to the module {module!r}{did_you_mean(module, modules)}")
    text = _dot(nodes, edges, inside, module or "step")
    if svg is not None:
        _draw(text, Path(svg))
    return text


_COLOURS = {"boxing": "#f4a261", "wait": "#fbe3cb", "input": "#d9e8d2", "loop": "#d8d0ea", "output": "#d9e8d2"}
_SBP_COLOURS = {"B": "#dbe7f5", "P": "#f7d4d8"}
_SPLIT_COLOUR = "#d5eef0"


def _dot(nodes: Sequence[NodeFacts], edges: Sequence[Edge], inside: set[str], name: str) -> str:
    by_id = {node.id: node for node in nodes}
    shown = [edge for edge in edges if edge.source in inside or edge.target in inside]
    # Inputs and outputs of the part are small text at its border.
    border = dict.fromkeys(end for edge in shown for end in (edge.source, edge.target) if end not in inside)
    lines = [
        f"digraph {_quoted(name)} {{",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10, margin="0.08,0.04"];',
        '  edge [color="#666666", arrowsize=0.6];',
        '  graph [fontname="Helvetica", labeljust=l];',
    ]
    members: dict[str, list[NodeFacts]] = {}
    for node in nodes:
        if node.id in inside:
            members.setdefault(node.module, []).append(node)
    parents = {module: _parent(module, members) for module in members if module}
    for module in members:
        if parents.get(module) is None:
            lines += _cluster(module, members, parents, "  ")
    lines += [
        f"  {_quoted(end)} [shape=plaintext, style=solid, fontsize=9, label={_quoted(by_id[end].label)}];"
        for end in border
    ]
    lines += [f"  {_quoted(edge.source)} -> {_quoted(edge.target)};" for edge in shown]
    return "\n".join([*lines, "}"])


def _parent(module: str, modules: Iterable[str]) -> str | None:
    """Return the innermost of these modules that contains the module, or None."""
    outer = (name for name in modules if name and name != module and within(module, name))
    return max(outer, key=len, default=None)


def _cluster(
    module: str, members: Mapping[str, Sequence[NodeFacts]], parents: Mapping[str, str | None], indent: str
) -> Iterator[str]:
    """Yield a frame around a module's nodes and the frames of its submodules; nodes without a module have no frame."""
    inner = f"{indent}  " if module else indent
    if module:
        name = _quoted(f"cluster {module}")
        yield f'{indent}subgraph {name} {{ label={_quoted(module)}; color="#999999"; fontsize=11;'
    yield from (f"{inner}{_quoted(node.id)} [{_style(node)}];" for node in members[module])
    for child, parent in parents.items():
        if parent == module and module:
            yield from _cluster(child, members, parents, inner)
    if module:
        yield f"{indent}}}"


def _style(node: NodeFacts) -> str:
    what = f"{node.boxing} of {node.tensor}" if node.boxing else node.operator
    shape = node.shape if node.shape == node.local_shape else f"{node.shape} -> {node.local_shape}"
    label = "\n".join(filter(None, (f"{node.id}: {what}", f"{node.dtype} {node.sbp} {shape}".strip())))
    colour = _COLOURS.get(node.kind) or _SBP_COLOURS.get(node.sbp, _SPLIT_COLOUR if node.sbp else "#ffffff")
    tooltip = _quoted(f"{node.phase} {node.source} {node.code}".strip())
    width = ", penwidth=2" if node.kind == "boxing" else ""
    return f'label={_quoted(label)}, fillcolor="{colour}", tooltip={tooltip}{width}'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _draw(text: str, path: Path) -> None:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be drawn: {path.parent} is not a writable folder")
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            f"{path} cannot be drawn: Graphviz's program 'dot' is not on this machine\n"
            "Install Graphviz (apt install graphviz), or leave svg out and draw the returned text elsewhere."
        )
    # Under a temporary name until it is complete.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        drawing = Path(folder) / "graph.svg"
        try:
            process = subprocess.run(
                [program, "-Tsvg", "-o", str(drawing)],
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
        if process.returncode:
            raise ConfigError(f"dot could not draw {path}: {process.stderr.strip()}")
        drawing.replace(path)


def write_tensorboard(step: RewrittenStep, folder: str | os.PathLike[str], number: int) -> Path:
    """Write scalars and the emitted graph into one event file in ``folder``.

    TensorBoard follows only the last file of a folder: use a folder without another open writer.

    Args:
        number: the step on TensorBoard's axis.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import scalar
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard's files are written by the package tensorboard, which cannot be imported: {error}\n"
            "Install it: pip install tensorboard."
        ) from error
    writer = FileWriter(str(folder))
    try:
        for name, value in scalars(step).items():
            writer.add_summary(scalar(name, value), number)
        # Without run metadata, which TensorBoard would show as an empty profile.
        writer.add_event(Event(graph_def=_graph_def(step).SerializeToString()), number)
    finally:
        writer.close()
    return Path(folder)


def scalars(step: RewrittenStep) -> dict[str, float]:
    """Return TensorBoard's scalars by tag: bytes of memory by kind, bytes sent and collectives by phase, nodes."""
    numbers = summary(step)
    memory = {
        "zerograph/memory/peak": numbers.memory.peak,
        "zerograph/memory/at rest": numbers.memory.at_rest,
        **{f"zerograph/memory at the peak/{kind}": count for kind, count in numbers.memory.kinds.items()},
    }
    traffic = {f"zerograph/bytes sent/{sent.phase} {sent.kind}": sent.bytes for sent in numbers.sent}
    times = {f"zerograph/collectives/{sent.phase} {sent.kind}": sent.times for sent in numbers.sent}
    total = {"zerograph/bytes sent/all": numbers.bytes_sent}
    return {**memory, **total, **traffic, **times, "zerograph/nodes": numbers.nodes}


def _graph_def(step: RewrittenStep) -> Any:
    from tensorboard.compat.proto import attr_value_pb2, graph_pb2, node_def_pb2, versions_pb2

    nodes, edges = facts(step.emitted, step.context)
    # In TensorBoard's tree: the module's path with slashes, then the node's name.
    names = {node.id: "/".join([*(node.module or node.phase or node.kind).split("."), node.id]) for node in nodes}
    inputs: dict[str, list[str]] = {}
    for edge in edges:
        inputs.setdefault(edge.target, []).append(names[edge.source])
    definitions = [
        node_def_pb2.NodeDef(
            name=names[node.id],
            op=node.boxing or node.operator,
            input=inputs.get(node.id, []),
            attr={
                name: attr_value_pb2.AttrValue(s=str(value).encode())
                for name, value in node.as_dict().items()
                if value not in ("", 0) and name not in ("label", "operator")
            },
        )
        for node in nodes
    ]
    return graph_pb2.GraphDef(node=definitions, versions=versions_pb2.VersionDef(producer=22))
