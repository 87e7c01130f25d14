"""Views of a step, compiled or only prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from zerograph.compiler.compiled import PreparedStep
from zerograph.errors import ConfigError, did_you_mean
from zerograph.inspection.collectives import Collective, collectives
from zerograph.inspection.diff import Diff, compare
from zerograph.inspection.explain import explain
from zerograph.inspection.lifetime import Life
from zerograph.inspection.pages import description, page
from zerograph.inspection.placements import planned_placements
from zerograph.inspection.summary import Summary, summary
from zerograph.inspection.text import Line, lines, show_text
from zerograph.ir.memory import Memory, profile
from zerograph.ir.sbp import NdSbp, Sbp
from zerograph.passes.pipeline import stages

if TYPE_CHECKING:
    import networkx
import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerograph.inspection.names import kind, tensor_moved
from zerograph.inspection.node_table import NodeTable, Row, loop_inputs
from zerograph.inspection.text import dtype_name, operator_name
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import boxing_of, meta, origin, role
from zerograph.ir.sbp import show
from zerograph.ir.sizes import largest
from zerograph.passes.context import Context

if TYPE_CHECKING:
    import networkx


class Inspection(PreparedStep):
    """A step with read-only views of it: text, diffs, the life of a tensor, memory, traffic, exports."""

    def __init__(self, step: PreparedStep) -> None:
        vars(self).update(vars(step))

    @property
    def memory(self) -> Memory:
        """Return the peak memory of this rank in bytes: its parts, and where in the step it is reached.

        The prediction is exact within some percent if nodes run one by one (backend ``"eager"``).
        """
        return profile(self.emitted).memory()

    def collectives(self) -> list[Collective]:
        """List the collectives in order: kind, bytes, tensors, phase. A collective appears once per run."""
        return [each for each, times in collectives(self.emitted, self.context) for _ in range(times)]

    def text(self, pass_name: str | None = None, module: str | None = None) -> str:
        """Show a graph, one node per line: module path and name, operator, dtype, SBP, global and local shape, source.

        Args:
            pass_name: show the graph after this pass; default: the graph that runs. See
                :mod:`zerograph.inspection.text`.
            module: qualified name of a module: show only its nodes.

        Raises:
            ConfigError: there is no such pass, or the module has no nodes.
        """
        (shown,) = self.texts(pass_name, module=module)
        return "\n".join(shown)

    def diff(self, before: str, after: str, module: str | None = None) -> Diff:
        """Compare the graphs after two passes: ``print(step.inspect.diff("place", "box"))``.

        Returns a unified diff of :meth:`text`. Lines that only moved are marked as moved. ``str()`` is coloured in a
        terminal.

        Args:
            before, after: names of passes; ``"capture"`` is the traced graph.
            module: qualified name of a module: compare only its nodes.

        Raises:
            ConfigError: there is no such pass, or the module has no nodes.
        """
        old, new = self.texts(before, after, module=module)
        return compare(old, new, (before, after))

    def explain(self, name: str) -> Life:
        """Return the lifetime of one tensor, with source lines.

        Its events: stored, gathered, used and freed; its gradient computed and reduced; updated.

        Args:
            name: qualified name of a parameter, of an entry of its optimizer state (``model.fc.weight.exp_avg``) or of
                a buffer; ``"input0"``; a node of :meth:`text`, with its module (``fc:addmm_2``) or without; or a
                module, for its output.

        Raises:
            ConfigError: there is no such tensor; the message lists close names.
        """
        return explain(self, name)

    def to_networkx(self, pass_name: str | None = None) -> networkx.MultiDiGraph[str]:
        """Export the graph after a pass, or the graph that runs.

        Its attributes are those of :func:`zerograph.inspection.step.to_networkx`; all are numbers and strings.

        Raises:
            ConfigError: there is no such pass.
        """
        return to_networkx(self.graph_after(pass_name).graph, self.context)

    def graph_after(self, name: str | None = None) -> fx.GraphModule:
        """Return the graph after the pass of that name, or after the last one.

        Raises:
            ConfigError: there is no such pass.
        """
        checked = _pass(self, name)
        return next(record for record in self.passes if record.name == checked).graph

    @property
    def summary(self) -> Summary:
        """The content of :meth:`page` as data."""
        return summary(self)

    def page(self) -> str:
        """Show the step on one screen: the traced program, buckets, collectives, memory, warnings."""
        return page(self.summary)

    def describe(self) -> str:
        """Show the step in full: every input, output, parameter, collective and pass."""
        return description(self)

    def texts(self, *names: str | None, module: str | None = None) -> list[list[str]]:
        """Return the lines of :meth:`text` after each of several passes; the pipeline runs once for all of them.

        Raises:
            ConfigError: there is no such pass, or the module has no nodes.
        """
        shown = _lines_after(self, *(_pass(self, name) for name in names))
        return [show_text(after, module).splitlines() for after in shown]


class Prepared(Inspection):
    """A prepared step and its views, as ``ZeroGraph.prepare()`` returns it.

    Attributes:
        device: the device that tensors on the meta device stand for.
    """

    def __init__(self, step: PreparedStep, device: torch.device | None = None) -> None:
        super().__init__(step)
        self.device = device

    def placements(self) -> dict[str, Sbp | NdSbp]:
        """Return the SBP between steps of every parameter and entry of optimizer state, by qualified name."""
        return planned_placements(self.layout, self.context.mesh.dims)


def _pass(step: PreparedStep, name: str | None) -> str:
    """Check the name of a pass; None means the last pass."""
    names = [record.name for record in step.passes]
    if name is None:
        return names[-1]
    if name not in names:
        raise ConfigError(f"there is no pass {name!r}{did_you_mean(name, names)}\nThere are {', '.join(names)}")
    return name


def _lines_after(step: PreparedStep, *names: str) -> list[list[Line]]:
    """Return the lines after each of the passes; run the pipeline at most once."""
    last = step.passes[-1].name
    shown = {last: lines(step.emitted, step.context)} if last in names else {}
    missing = set(names) - set(shown)
    for name, module in stages(step.captured.graph, step.context) if missing else ():
        if name in missing:
            shown[name] = lines(module.graph, step.context)
            missing.discard(name)
        if not missing:
            break
    return [shown[name] for name in names]


def to_networkx(graph: fx.Graph, context: Context) -> networkx.MultiDiGraph[str]:
    """Return a graph of the same nodes; those in the body of a loop have the loop's name and a slash before theirs.

    An edge leads from a node to a reader of its value; its attribute ``argument`` is the value's number among the
    reader's inputs. An operand of a loop has edges to the loop and to the input of its body. The attributes of nodes
    are numbers and text only, which every file format can hold:

    - ``label``: module path and name, see :mod:`zerograph.inspection.names`.
    - ``kind``: ``"input"``, ``"compute"``, ``"boxing"``, ``"wait"``, ``"loop"`` or ``"output"``.
    - ``operator``: ``mm``, ``mm.out``, ...; of an input its kind: ``parameter``, ``bucket``, ``state``, ...
    - ``phase``, ``module``: origin of the node.
    - ``source``: the user's ``file:line``; ``code`` is the text of that line.
    - ``dtype``, ``sbp``, ``shape``, ``local_shape``: of its value; empty if it returns several tensors, or none.
    - ``bytes``: size of its value on this rank, at the largest dynamic dimensions seen or declared; 0 likewise.
    - ``at``: index in the graph, from 0; bodies of loops count once.
    - ``times``: number of runs per step.
    - ``boxing``: ``all-gather`` and so on if the node changes an SBP, else empty.
    - ``tensor``: the tensor that it moves: ``bucket0``, ``gradient of bucket0``, ...
    - ``sent``: bytes that each rank sends.
    - ``parameter``: the parameter that it is, or is a view of; else empty.
    """
    import networkx

    table = NodeTable(graph)
    exported: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    exported.add_nodes_from((row.name("/"), _attributes(row, table, context)) for row in table)
    for row in table:
        for number, source in enumerate(row.node.all_input_nodes):
            exported.add_edge(table[source].name("/"), row.name("/"), argument=number)
        for operand, placeholder in loop_inputs(row.node) if loop_of(row.node) is not None else ():
            exported.add_edge(table[operand].name("/"), table[placeholder].name("/"), argument=0)
    return exported


def _attributes(row: Row, table: NodeTable, context: Context) -> dict[str, Any]:
    node, value = row.node, row.node.meta.get("val")
    sbp, where, moved, graph_input = meta(node).get("sbp"), origin(node), boxing_of(node), role(node)
    of_value: dict[str, Any] = {"dtype": "", "sbp": "", "shape": "", "local_shape": "", "bytes": 0}
    if isinstance(value, Tensor):
        shape, local = table.shapes(node, context)
        of_value = {
            "dtype": dtype_name(value.dtype),
            "sbp": "" if sbp is None else show(sbp),
            "shape": str(local if shape is None else shape),
            "local_shape": str(local),
            "bytes": math.prod(largest(local)) * value.element_size(),
        }
    parameter = meta(node).get("parameter", "")
    return {
        "label": row.label,
        "kind": kind(node),
        "operator": operator_name(node) if graph_input is None else graph_input.kind,
        "phase": where.phase if "origin" in node.meta else "",
        "module": where.module,
        "source": where.source,
        "code": where.code,
        **of_value,
        "at": row.index,
        "times": row.times,
        "boxing": "" if moved is None else moved.kind,
        "tensor": str(tensor_moved(node) or ""),
        "sent": 0 if moved is None else round(moved.sent),
        "parameter": graph_input.name if graph_input is not None and graph_input.kind == "parameter" else parameter,
    }
