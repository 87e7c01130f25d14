"""Graphs with the metadata of their nodes, captured graphs and updates of optimizers as JSON, and back."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.artifact import operators
from zerograph.artifact.values import Reader, Writer
from zerograph.capture.captured import Captured
from zerograph.capture.state_changes import StateChanges
from zerograph.errors import ArtifactError
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import NodeMeta, boxing_of, meta
from zerograph.ir.rank_numbers import RankNumber
from zerograph.ir.region import Region, local as local_operator, region_of
from zerograph.ir.sizes import Sizes
from zerograph.ir.update_program import UpdateProgram
from zerograph.ops import flex_attention

# The loop is a part of its node.
_KEYS = (*tuple(key for key in NodeMeta.__annotations__ if key not in ("loop", "compiled")), "global")


@dataclass(frozen=True)
class GraphWriter:
    """Writes graphs.

    Attributes:
        writer: writes their values.
        groups: names of the process groups along the mesh dimensions, which differ between jobs.
        regions: the local regions that the graphs refer to.
    """

    writer: Writer
    groups: Sequence[str] = ()
    regions: Sequence[Region] = ()

    def write(self, module: nn.Module | None, graph: fx.Graph) -> list[Any]:
        """Return the nodes of a graph.

        Args:
            module: has the constants and submodules of the graph.

        Raises:
            ArtifactError: the graph has a node that cannot be written.
        """
        numbers: dict[fx.Node, int] = {}
        entries = []
        for node in graph.nodes:
            entry = {
                "op": node.op,
                "name": node.name,
                **self._target(node, module),
                "args": self.writer.value(self._arguments(node), numbers),
                "meta": {key: self.writer.interned(node.meta[key]) for key in _KEYS if key in node.meta},
            }
            if node.kwargs:
                entry["kwargs"] = self.writer.value(dict(node.kwargs), numbers)
            entries.append(entry)
            numbers[node] = len(numbers)
        return entries

    def _target(self, node: fx.Node, module: nn.Module | None) -> dict[str, Any]:
        if node.op == "call_function":
            return {"target": operators.name_of(node.target)}
        name = str(node.target)
        if node.op == "get_attr":
            constant = None if module is None else getattr(module, name, None)
            if not isinstance(constant, Tensor):
                raise ArtifactError(f"the step has a constant {name} of type {type(constant).__name__}")
            return {"target": name, "data": self.writer.tensor(constant)}
        if node.op != "call_module":
            return {"target": name}
        loop = loop_of(node)
        if loop is None:
            # The runtime makes the update of each rank's own parameters.
            return {"target": name, "update_of": meta(node)["bucket"]}
        body = self.write(loop.body, loop.body.graph)
        values = self.writer.value((loop.cuts, loop.results, loop.sizes))
        return {"target": name, "loop": [body, loop.micro_batches, values]}

    def _arguments(self, node: fx.Node) -> tuple[Any, ...]:
        if node.target is local_operator:
            return node.args[0], self.regions.index(region_of(node))
        if (boxing := boxing_of(node)) is not None and node.args and node.args[-1] in self.groups:
            if self.groups[boxing.dim] != node.args[-1]:
                raise ArtifactError(f"the process group of {node} is not that of its mesh dimension")
            return (*node.args[:-1], None)
        return node.args


@dataclass(frozen=True)
class GraphReader:
    """Reads graphs.

    Attributes:
        reader: reads their values.
        mesh: the ranks, and this one's position.
        owner_update: returns the module that updates this rank's parameters of a bucket.
        regions: the local regions that the graphs refer to.
    """

    reader: Reader
    mesh: Mesh | None = None
    owner_update: Callable[[str], nn.Module] | None = None
    regions: Sequence[Region] = ()

    def read(self, entries: Sequence[Mapping[str, Any]]) -> fx.GraphModule:
        """Return the graph of these entries, as a module that generates its code on first use.

        Raises:
            ArtifactError: the entries are no graph.
        """
        root, graph = nn.Module(), fx.Graph()
        nodes: list[fx.Node] = []
        with _torch.raw_sizes():
            for entry in entries:
                nodes.append(self._node(graph, root, entry, nodes))
        return _torch.graph_module(root, graph)

    def _node(self, graph: fx.Graph, root: nn.Module, entry: Mapping[str, Any], nodes: Sequence[fx.Node]) -> fx.Node:
        op, name, target = entry["op"], entry["name"], entry["target"]
        args = self.reader.value(entry["args"], nodes)
        kwargs = self.reader.value(entry.get("kwargs", {"d": []}), nodes)
        # Names are part of the code that a graph generates.
        for text in (name, target, *kwargs):
            _check_name(text)
        function: Any = target
        if op == "call_function":
            function = operators.function_of(target)
            args = self._checked(function, args, kwargs)
        elif op == "get_attr":
            root.register_buffer(target, self.reader.tensor(entry["data"]), persistent=False)
        elif op == "call_module":
            root.add_module(target, self._submodule(entry))
        elif op not in ("placeholder", "output"):
            raise ArtifactError(f"the file has a node of kind {op!r:.40}")
        node = graph.create_node(op, function, name=name)
        if node.name != name:
            raise ArtifactError(f"the file has two nodes of the name {name!r:.60}")
        # Not arguments of create_node(), which walks through them once more.
        _torch.set_arguments(node, args, kwargs)
        for key, value in entry["meta"].items():
            if key not in _KEYS:
                raise ArtifactError(f"the file has metadata {key!r:.40}")
            node.meta[key] = self.reader.value(value)
        self._place(node)
        if op == "call_module" and "loop" in entry:
            meta(node)["loop"] = root.get_submodule(target)  # type: ignore[typeddict-item]
        return node

    def _checked(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not isinstance(function, _torch.OpOverload):
            return args
        by_name = operators.bound(function, args, kwargs)
        if function is local_operator:
            tensors, region = by_name.values()
            return tensors, self.regions[region].number
        if function in (flex_attention.flex_attention, flex_attention.flex_attention_backward):
            for text in filter(None, (by_name["score_mod"], by_name["mask_mod"])):
                operators.check_modification(text)
        return args

    def _submodule(self, entry: Mapping[str, Any]) -> nn.Module:
        if "loop" not in entry:
            assert self.owner_update is not None
            return self.owner_update(entry["update_of"])
        body, micro_batches, values = entry["loop"]
        cuts, results, sizes = self.reader.value(values)
        loop = Loop(self.read(body), int(micro_batches), cuts, results)
        loop.sizes = sizes
        return loop

    def _place(self, node: fx.Node) -> None:
        """Set the arguments that belong to this rank: its process groups, and what follows from its position."""
        if self.mesh is None:
            return
        if (boxing := boxing_of(node)) is not None and node.args and node.args[-1] is None:
            node.args = (*node.args[:-1], self.mesh.groups[boxing.dim])
        for position, numbers in node.meta.get("rank_arguments", {}).items():
            node.update_arg(position, _at(numbers, node.args[position], self.mesh.position))


def _at(numbers: Any, argument: Any, position: Sequence[int]) -> Any:
    if isinstance(numbers, RankNumber):
        return numbers.at(position)
    if isinstance(numbers, tuple):
        pairs = zip(numbers, argument, strict=True)
        return [entry if number is None else number.at(position) for number, entry in pairs]
    return argument


def _check_name(text: Any) -> None:
    if not isinstance(text, str) or not operators.IDENTIFIER.fullmatch(text) or keyword.iskeyword(text):
        raise ArtifactError(f"the file has the name {text!r:.60}, which is no name of Python")


def write_captured(captured: Captured, writer: Writer) -> dict[str, Any]:
    """Return a captured graph as JSON.

    Raises:
        ArtifactError: it depends on Python state that ``build()`` changes, or cannot be written.
    """
    if captured.state_changes.guards:
        names = ", ".join(dict.fromkeys(place.name for place in captured.state_changes.guards))
        raise ArtifactError(
            f"the step depends on Python state that build() changes ({names}), which another process does not have\n"
            "Keep it in a buffer, or change it outside build(), to export the step."
        )
    sizes = captured.sizes
    return {
        "sizes": None if sizes is None else writer.value((tuple(sizes.dims.values()), sizes.described())),
        "regions": [
            [GraphWriter(writer).write(None, region.graph), writer.value((region.inputs, region.outputs))]
            for region in captured.regions
        ],
        "graph": GraphWriter(writer, regions=captured.regions).write(captured.graph, captured.graph.graph),
        "output": writer.tree(captured.output_spec),
        "returned": writer.value(captured.returned),
        "gradients": list(captured.gradients),
        "guards": writer.value(captured.guards),
        "warnings": list(captured.state_changes.warnings),
    }


def read_captured(encoded: Mapping[str, Any], reader: Reader) -> Captured:
    """Return the captured graph that :func:`write_captured` wrote, in the fake mode of the reader."""
    guards = reader.value(encoded["guards"])
    if encoded["sizes"] is not None:
        dims, described = reader.value(encoded["sizes"])
        reader.sizes = Sizes.restored(_torch.size_env(reader.mode), dims, described, guards)
    regions = []
    for graph, signature in encoded["regions"]:
        inputs, outputs = reader.value(signature)
        regions.append(Region(GraphReader(reader).read(graph).graph, inputs, outputs))
    return Captured(
        GraphReader(reader, regions=regions).read(encoded["graph"]),
        reader.tree(encoded["output"]),
        reader.value(encoded["returned"]),
        tuple(encoded["gradients"]),
        tuple(regions),
        StateChanges(warnings=tuple(encoded["warnings"])),
        guards,
        reader.sizes,
    )


def write_program(program: UpdateProgram, writer: Writer) -> dict[str, Any]:
    """Return an update as JSON."""
    graphs = {"graph": program.graph, "first": program.first, "fused": program.fused}
    write = GraphWriter(writer).write
    values = {name: getattr(program, name) for name in _VALUES}
    return {
        **{name: None if module is None else write(module, module.graph) for name, module in graphs.items()},
        "values": writer.value(values),
    }


_VALUES = ("optimizer", "key", "state", "operators", "mixes", "any_shape", "shapes", "numbers", "thresholds")


def read_program(encoded: Mapping[str, Any], reader: Reader) -> UpdateProgram:
    """Return the update that :func:`write_program` wrote."""

    def graph(name: str) -> fx.GraphModule | None:
        return None if encoded[name] is None else GraphReader(reader).read(encoded[name])

    main = graph("graph")
    if main is None:
        raise ArtifactError("the file has an update without a graph")
    return UpdateProgram(graph=main, first=graph("first"), fused=graph("fused"), **reader.value(encoded["values"]))
