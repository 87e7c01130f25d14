"""Layers of the package: a module imports only from its own layer and from lower ones, and there are no cycles.

Modules, the central functions and the central classes stay short.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import statistics
from collections.abc import Iterator
from pathlib import Path

import networkx

from zerograph.compiler.compiler import Compiler
from zerograph.passes.context import Context

ROOT = Path(__file__).parents[1]

# Lowest first. Modules and packages of one line may import each other, but not in a cycle.
LAYERS = (
    ("zerograph.errors", "zerograph._torch", "zerograph.base"),
    ("zerograph.ir", "zerograph.ops"),
    ("zerograph.config",),
    ("zerograph.passes",),
    ("zerograph.runtime",),
    ("zerograph.capture",),
    ("zerograph.eager",),
    ("zerograph.optim",),
    ("zerograph.artifact",),
    ("zerograph.compiler",),
    ("zerograph.state",),
    ("zerograph.inspection", "zerograph.planner"),
    ("zerograph.graph", "zerograph.data"),
    ("zerograph.loops",),
    ("zerograph.planner.front",),
    ("zerograph.compat",),
    ("zerograph.integrations",),
    ("zerograph.cli",),
    ("zerograph", "zerograph.mesh", "zerograph.sbp", "zerograph.__main__"),
)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder, package in (
        ("zerograph", "zerograph"),
        ("passes", "zerograph.passes"),
        ("runtime", "zerograph.runtime"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "zerograph" and parts[0] in ("passes", "runtime"):
                continue
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


@functools.cache
def edges() -> list[tuple[str, str, str]]:
    """Importing module, imported one, and the place, of each import of the package."""
    known = modules()
    return [
        (module, imported, f"{path.relative_to(ROOT)}:{line}")
        for module, path in known.items()
        for line, imported in imports(path, known)
    ]


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and name of each module of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                name = f"{node.module}.{one.name}"
                if name in known:
                    yield node.lineno, name
                elif node.module in known:
                    yield node.lineno, node.module


def layer(module: str) -> int:
    """The layer of the longest prefix that is listed."""
    listed = [
        (len(name), at) for at, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")
    ]
    return max(listed)[1]


def test_imports_point_downward() -> None:
    upward = [
        f"{place}: {module} -> {imported}"
        for module, imported, place in edges()
        if layer(imported) > layer(module) and imported != "zerograph"
    ]
    assert not upward, "\n".join(upward)


def test_there_are_no_cycles() -> None:
    graph = networkx.DiGraph((module, imported) for module, imported, _ in edges())
    # Names of the package itself are imported lazily.
    graph.remove_node("zerograph")
    cycles = [sorted(component) for component in networkx.strongly_connected_components(graph) if len(component) > 1]
    assert not cycles


def test_the_top_level_is_short() -> None:
    assert len(list((ROOT / "zerograph").glob("*.py"))) <= 10


def test_modules_and_what_is_central_are_short() -> None:
    assert statistics.median(len(path.read_text().splitlines()) for path in modules().values()) < 150
    assert len(inspect.getsourcelines(Compiler.prepare)[0]) < 50
    assert len(dataclasses.fields(Context)) < 12
