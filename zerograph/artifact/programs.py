"""Captured graphs and updates of optimizers as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from zerograph import _torch
from zerograph.artifact.graphs import GraphReader, GraphWriter
from zerograph.artifact.values import Reader, Writer
from zerograph.capture.captured import Captured
from zerograph.capture.state_changes import StateChanges
from zerograph.errors import ArtifactError
from zerograph.ir.region import Region
from zerograph.ir.sizes import Sizes
from zerograph.ir.update_program import UpdateProgram


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
