"""Hyperparameters that change from step to step: inputs of the graph, like the learning rate, instead of constants.

A constant of a traced update is such a number if it follows it: the update is traced again with another value, and must
be the same but for constants that were the value and are the new one, or were one minus it and still are. They become
reads of a 0-d fp64 input. Where Python compared the number with another, the graph holds for values on the same side.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import Path

aten = torch.ops.aten

LR: Path = ("lr",)


class NotLiftedError(Exception):
    """The update uses the number in other ways than as itself: it stays a constant."""


def numbers(group: Mapping[str, Any]) -> dict[Path, float]:
    """Every float of the group but the learning rate and what schedulers note there; one level deep."""
    found: dict[Path, float] = {}
    for key, value in group.items():
        if key in ("params", "lr", "initial_lr", "max_lr", "min_lr"):
            continue
        parts = enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)]
        for index, part in parts:
            if isinstance(part, float):
                found[(key,) if index is None else (key, index)] = part
    return found


def read(group: Mapping[str, Any], path: Path) -> float:
    """Return the present number; 0 for the learning rate of a group that has none."""
    value = group.get(path[0], 0.0)
    return float(value[path[1]] if len(path) > 1 else value)


def replaced(group: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return the group with another value at this path."""
    if len(path) == 1:
        return {**group, path[0]: value}
    parts = list(group[path[0]])
    parts[path[1]] = value
    return {**group, path[0]: tuple(parts)}


def name(path: Path) -> str:
    """``momentum``, ``betas[0]``."""
    return str(path[0]) if len(path) == 1 else f"{path[0]}[{path[1]}]"


class Watched(float):
    """A number that remembers what the optimizer's code compared it with, in ``thresholds``.

    Not torch's: it looks constants up in caches.
    """

    thresholds: set[float]

    def __new__(cls, value: float, thresholds: set[float]) -> Watched:
        """Make the number, which adds what it is compared with to ``thresholds``."""
        made = super().__new__(cls, value)
        made.thresholds = thresholds
        return made

    def _seen(self, other: Any) -> None:
        if isinstance(other, (int, float)) and source.is_optimizers(sys._getframe(2).f_code.co_filename):
            self.thresholds.add(float(other))

    def __eq__(self, other: Any) -> bool:
        self._seen(other)
        return super().__eq__(other)

    def __ne__(self, other: Any) -> bool:
        self._seen(other)
        return super().__ne__(other)

    def __lt__(self, other: Any) -> bool:
        self._seen(other)
        return super().__lt__(other)

    def __le__(self, other: Any) -> bool:
        self._seen(other)
        return super().__le__(other)

    def __gt__(self, other: Any) -> bool:
        self._seen(other)
        return super().__gt__(other)

    def __ge__(self, other: Any) -> bool:
        self._seen(other)
        return super().__ge__(other)

    def __bool__(self) -> bool:
        self._seen(0.0)
        return super().__bool__()

    __hash__ = float.__hash__


def sides(value: float, thresholds: set[float]) -> tuple[int, ...]:
    """On which side of each threshold the value lies: programs hold while this stays the same."""
    return tuple((value > one) - (value < one) for one in sorted(thresholds))


def another(value: float, thresholds: set[float]) -> float | None:
    """Return a second value to trace with, on the same side of every threshold; None if ``value`` is a threshold."""
    if value in thresholds:
        return None
    # No round number, of the same sign, and within [0, 1) where the value is.
    found = value * 0.8137 if value else 0.0513
    while sides(found, thresholds) != sides(value, thresholds):
        found = (found + value) / 2
    return found


@dataclass
class Lift:
    """What is to become an input in one graph: (node, place among its flat arguments, name, one minus it)."""

    graph: fx.GraphModule
    edits: list[tuple[fx.Node, int, str, bool]] = field(default_factory=list)

    def compare(self, other: fx.GraphModule, number: str, old: float, new: float) -> None:
        """Find the constants that followed the number from ``old`` to ``new``, the value in ``other``.

        Raises:
            NotLiftedError: the graphs differ in something else.
        """
        nodes, others = list(self.graph.graph.nodes), list(other.graph.nodes)
        place = {node: index for index, node in enumerate(nodes)} | {node: index for index, node in enumerate(others)}
        if len(nodes) != len(others):
            raise NotLiftedError
        for node, its in zip(nodes, others, strict=True):
            mine, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
            theirs, other_spec = pytree.tree_flatten((its.args, dict(its.kwargs)))
            if (node.op, str(node.target), spec) != (its.op, str(its.target), other_spec):
                raise NotLiftedError
            if node.op == "get_attr" and not _same(self.graph, other, str(node.target)):
                raise NotLiftedError
            for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if isinstance(a, fx.Node) and isinstance(b, fx.Node) and place[a] == place[b]:
                    continue
                if not isinstance(a, float) or not isinstance(b, float):
                    if type(a) is not type(b) or a != b:
                        raise NotLiftedError
                elif float(a) == float(old) and float(b) == float(new):
                    self.edits.append((node, index, number, False))
                elif float(a) == 1 - float(old) and float(b) == 1 - float(new):
                    self.edits.append((node, index, number, True))
                elif float(a) != float(b):
                    raise NotLiftedError

    def apply(self, names: list[str]) -> None:
        """Add an input for each of ``names`` behind the last one; the constants that were found read them."""
        graph = self.graph.graph
        last = placeholders(graph)[-1]
        fake: Tensor = next(node for node in placeholders(graph) if meta(node)["update_input"] == "lr").meta["val"]
        inputs: dict[str, fx.Node] = {}
        for number in names:
            with graph.inserting_after(last):
                last = inputs[number] = graph.placeholder(number.replace("[", "_").replace("]", ""))
            meta(last).update({"update_input": number, "val": fake.clone()})
        reads: dict[tuple[str, bool], fx.Node] = {}
        for node, index, number, complement in self.edits:
            if (number, complement) not in reads:
                with graph.inserting_before(next(one for one in graph.nodes if one.op != "placeholder")):
                    given = inputs[number]
                    read = graph.call_function(aten._local_scalar_dense.default, (given,))
                    read.meta["val"] = fake.item()
                if complement:
                    with graph.inserting_before(read):
                        rest = graph.call_function(aten.rsub.Scalar, (given, 1))
                        rest.meta["val"] = fake.clone()
                    read.args = (rest,)
                reads[number, complement] = read
            read = reads[number, complement]
            leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
            leaves[index] = read
            node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
            # torch before 2.13 asks of a number whether it is 1. The kernel is the same, and what it returns is if the
            # exponent is as wide.
            base, exponent = read.all_input_nodes[0], node.all_input_nodes[-1]
            if node.target is aten.pow.Scalar and exponent.meta["val"].dtype is fake.dtype:
                node.target, node.args = aten.pow.Tensor_Tensor, (base, exponent)
        for read in reads.values():
            if not read.users:
                graph.erase_node(read)
        self.graph.recompile()


def _same(one: fx.GraphModule, other: fx.GraphModule, attribute: str) -> bool:
    mine, its = getattr(one, attribute), getattr(other, attribute)
    return isinstance(mine, Tensor) and isinstance(its, Tensor) and torch.equal(mine, its)
