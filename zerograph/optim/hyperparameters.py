"""Turn hyperparameters that change from step to step into inputs of the graph, like the learning rate.

The update is traced a second time with another value of the hyperparameter. Both traces must be equal, except for
constants that equal the value, or one minus the value, in both. These constants become reads of a 0-d fp64 input. If
Python code compared the number with a threshold, the graph is valid for values on the same side of it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.capture.places import Identity
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import Path
from zerograph.runtime.tensor_hash import hash_bits

aten = torch.ops.aten

LR: Path = ("lr",)
# The end of the path of a number that is an attribute of the optimizer.
OF_OPTIMIZER: Path = ("of the optimizer",)


class NotLiftedError(Exception):
    """The update uses the number other than as itself or one minus itself: it stays a constant."""


def numbers(group: Mapping[str, Any]) -> dict[Path, float]:
    """Return the floats of a group, one level deep, without the learning rate and what schedulers store there."""
    floats: dict[Path, float] = {}
    for key, value in group.items():
        if key in ("params", "lr", "initial_lr", "max_lr", "min_lr"):
            continue
        parts = enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)]
        for index, part in parts:
            if isinstance(part, float):
                floats[(key,) if index is None else (key, index)] = part
    return floats


def text_of(value: Any) -> str:
    """Return a text that is equal for equal hyperparameters, on all ranks but for the addresses of objects.

    The ``repr()`` of a tensor or an array shows some digits, and of a large one some elements.
    """

    def exact(leaf: Any) -> Any:
        leaf = leaf.value if isinstance(leaf, Identity) else leaf
        if isinstance(leaf, Tensor) and not leaf.is_meta and type(leaf) is not _torch.FakeTensor:
            return leaf.dtype, tuple(leaf.shape), hash_bits(leaf).item()
        if isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject:
            return leaf.dtype, leaf.shape, hashlib.sha256(leaf.tobytes()).hexdigest()
        return leaf

    return repr(pytree.tree_map(exact, value))


def read(group: Mapping[str, Any], path: Path) -> float:
    """Return the present number; 0 for the learning rate of a group that has none."""
    value = group.get(path[0])
    return 0.0 if value is None else float(value[path[1]] if len(path) > 1 else value)


def replaced(group: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return the group with another value at this path."""
    if len(path) == 1:
        return {**group, path[0]: value}
    parts = list(group[path[0]])
    parts[path[1]] = value
    return {**group, path[0]: tuple(parts)}


def name(path: Path) -> str:
    """Return the name of a hyperparameter: ``momentum``, ``betas[0]``."""
    if path[1:] == OF_OPTIMIZER:
        return f"self.{path[0]}"
    return str(path[0]) if len(path) == 1 else f"{path[0]}[{path[1]}]"


def place(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], path: Path) -> tuple[Any, Path]:
    """Return where a number is read: in the group, or among the optimizer's attributes."""
    return (vars(optimizer), path[:1]) if path[1:] == OF_OPTIMIZER else (group, path)


class Watched(float):
    """A number that records in ``thresholds`` what the optimizer's code compares it with.

    Comparisons by torch's code do not count: it looks constants up in caches.
    """

    thresholds: set[float]

    def __new__(cls, value: float, thresholds: set[float]) -> Watched:
        """Create the number; it adds each number that it is compared with to ``thresholds``."""
        number = super().__new__(cls, value)
        number.thresholds = thresholds
        return number

    def _seen(self, other: Any) -> None:
        if isinstance(other, (int, float)) and source.is_optimizers(sys._getframe(2).f_code.co_filename):
            self.thresholds.add(float(other))


def _watching(name: str) -> Any:
    """Return the method of a float, which notes first what the number is compared with."""
    compare = getattr(float, name)

    def watching(number: Watched, *other: Any) -> Any:
        # bool() compares with zero.
        number._seen(*(other or (0.0,)))
        return compare(number, *other)

    return watching


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__"):
    setattr(Watched, _name, _watching(_name))


def sides(value: float, thresholds: set[float]) -> tuple[int, ...]:
    """Return on which side of each threshold the value is: programs are valid while this stays the same."""
    return tuple((value > threshold) - (value < threshold) for threshold in sorted(thresholds))


def another(value: float, thresholds: set[float]) -> float | None:
    """Return a second value to trace with, on the same side of every threshold; None if ``value`` is a threshold."""
    if value in thresholds:
        return None
    # Not a round number, of the same sign, and within [0, 1) if the value is.
    candidate = value * 0.8137 if value else 0.0513
    while sides(candidate, thresholds) != sides(value, thresholds):
        candidate = (candidate + value) / 2
    return candidate


@dataclass
class Lift:
    """The constants of a graph that become inputs.

    Attributes:
        graph: the graph.
        edits: for each constant its node, its index among the flat arguments, the hyperparameter's name, and whether it
            is one minus the hyperparameter.
    """

    graph: fx.GraphModule
    edits: list[tuple[fx.Node, int, str, bool]] = field(default_factory=list)

    def compare(self, other: fx.GraphModule, number: str, old: float, new: float) -> None:
        """Find the constants that changed with the hyperparameter.

        Args:
            other: the graph that was traced with the new value.
            number: the hyperparameter's name.
            old: its value in this graph.
            new: its value in ``other``.

        Raises:
            NotLiftedError: the graphs differ in anything else.
        """
        nodes, others = list(self.graph.graph.nodes), list(other.graph.nodes)
        place = {node: index for index, node in enumerate(nodes)} | {node: index for index, node in enumerate(others)}
        if len(nodes) != len(others):
            raise NotLiftedError
        for node, other_node in zip(nodes, others, strict=True):
            leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
            other_leaves, other_spec = pytree.tree_flatten((other_node.args, dict(other_node.kwargs)))
            if (node.op, str(node.target), spec) != (other_node.op, str(other_node.target), other_spec):
                raise NotLiftedError
            if node.op == "get_attr" and not _same(self.graph, other, str(node.target)):
                raise NotLiftedError
            for index, (a, b) in enumerate(zip(leaves, other_leaves, strict=True)):
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
        """Add an input for each of ``names`` after the last one, and replace the constants by reads of them."""
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
                with graph.inserting_before(next(other for other in graph.nodes if other.op != "placeholder")):
                    placeholder = inputs[number]
                    read = graph.call_function(aten._local_scalar_dense.default, (placeholder,))
                    read.meta["val"] = fake.item()
                if complement:
                    with graph.inserting_before(read):
                        rest = graph.call_function(aten.rsub.Scalar, (placeholder, 1))
                        rest.meta["val"] = fake.clone()
                    read.args = (rest,)
                reads[number, complement] = read
            read = reads[number, complement]
            leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
            leaves[index] = read
            node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
            # Before torch 2.13, pow(number, tensor) checks whether the number is 1, which needs its value. The overload
            # for two tensors runs the same kernel, with the same result if both have the same dtype.
            base, exponent = read.all_input_nodes[0], node.all_input_nodes[-1]
            if node.target is aten.pow.Scalar and exponent.meta["val"].dtype is fake.dtype:
                node.target, node.args = aten.pow.Tensor_Tensor, (base, exponent)
            elif node.target is aten.fill_.Scalar:
                node.target, node.args = aten.fill_.Tensor, (node.args[0], base)
        for read in reads.values():
            if not read.users:
                graph.erase_node(read)
        self.graph.recompile()


def _same(graph: fx.GraphModule, other: fx.GraphModule, attribute: str) -> bool:
    tensor, other_tensor = getattr(graph, attribute), getattr(other, attribute)
    return isinstance(tensor, Tensor) and isinstance(other_tensor, Tensor) and torch.equal(tensor, other_tensor)
