"""Values of a graph as JSON, and back. Only the types below are written, and only they are read.

Numbers, strings, booleans and None are themselves. A JSON list is a tuple. Every other value is an object with one key:
the tag of its type. Values that occur often, such as origins and the shapes of fake tensors, are entries of a table,
written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import CachingFakeMode, FakeTensor, OpOverload, pytree
from zerograph.artifact import operators
from zerograph.errors import ArtifactError
from zerograph.ir.dims import Dim, SizeGuard, SizeInput
from zerograph.ir.loop import Result
from zerograph.ir.metadata import Boxing, Coded, Origin, Role, TensorRef
from zerograph.ir.rank_numbers import RankNumber
from zerograph.ir.region import GlobalSpec
from zerograph.ir.sbp import Broadcast, PartialSum, Signature, Split
from zerograph.ir.sizes import Sizes
from zerograph.ir.update_program import StateSpec
from zerograph.ops.blocks import Codec

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(Boxing, Broadcast, Codec, Coded, Dim, GlobalSpec, Origin, PartialSum, RankNumber, Result, Role, Signature),
        *(SizeGuard, SizeInput, Split, StateSpec, TensorRef),
    )
}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What a file refers to by its name in torch.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
# What nodes take as arguments besides nodes, plain values and containers: a graph's code has their texts.
_ARGUMENTS = (float, complex, torch.device, *_CONSTANTS, *_SYMBOLIC, OpOverload)
_PLAIN = frozenset({type(None), bool, int, str})
_CONTAINERS: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict}


class Writer:
    """Writes values.

    Attributes:
        table: the values that others refer to.
        tensors: tensors with data, by name; what they share in memory is written once for each.
    """

    def __init__(self) -> None:
        self.table: list[Any] = []
        self.tensors: dict[str, Tensor] = {}
        self._entries: dict[str, int] = {}
        self._tensor_names: dict[int, str] = {}
        # References by ``id``, with the values, which must not change as long as the writer is used.
        self._interned_values: dict[int, tuple[Any, Any]] = {}

    def value(self, value: Any, nodes: Mapping[fx.Node, int] | None = None) -> Any:
        """Return a value as JSON.

        Args:
            nodes: the number of each node that the value may contain.

        Raises:
            ArtifactError: a value is of another type.
        """
        kind = type(value)
        if kind in _PLAIN or isinstance(value, str):
            return value
        if kind is tuple or kind is torch.Size:
            return [entry if type(entry) in _PLAIN else self.value(entry, nodes) for entry in value]
        if kind is fx.Node:
            assert nodes is not None
            return {"n": nodes[value]}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list):
            return {"l": [self.value(entry, nodes) for entry in value]}
        if isinstance(value, slice):
            return {"slice": [self.value(entry, nodes) for entry in (value.start, value.stop, value.step)]}
        if isinstance(value, (dict, Mapping)):
            return {"d": [[self.value(key), self.value(entry, nodes)] for key, entry in value.items()]}
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, _CONSTANTS):
            return {"torch": _name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, OpOverload):
            return {"op": operators.name_of(value)}
        if isinstance(value, (set, frozenset)):
            return {"set": sorted(self.value(entry) for entry in value)}
        if value is Tensor:
            return {"Tensor": None}
        if isinstance(value, _SYMBOLIC):
            number = _torch.describe_number(value)
            if number is not None:
                return self._interned({"size": number})
        if isinstance(value, FakeTensor):
            shape, stride = self.value(tuple(value.shape)), self.value(tuple(value.stride()))
            return self._interned({"fake": [shape, stride, _name(value.dtype), str(value.device)]})
        cls = type(value)
        if _CLASSES.get(cls.__name__) is cls:
            if id(value) not in self._interned_values:
                parts = [self.value(getattr(value, field.name)) for field in fields(value)]
                self._interned_values[id(value)] = value, self._interned({cls.__name__: parts})
            return self._interned_values[id(value)][1]
        raise ArtifactError(
            f"the step has {value!r:.80} of type {cls.__qualname__}, which cannot be written to a file\n"
            "Run this step without exporting it."
        )

    def tensor(self, tensor: Tensor) -> Any:
        """Return a reference to a tensor whose data is written too.

        Raises:
            ArtifactError: it is no dense tensor.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise ArtifactError(f"the step has a constant of type {type(tensor).__name__}, which cannot be written")
        name = self._tensor_names.setdefault(id(tensor), f"constant{len(self._tensor_names)}")
        # Dimensions of stride 0 repeat what is written once.
        dense = tensor.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        self.tensors[name] = dense.cpu().contiguous()
        return {"data": [name, list(tensor.shape), list(tensor.stride()), str(tensor.device)]}

    def interned(self, value: Any) -> Any:
        """Return a reference to the entry of a value in the table."""
        if id(value) not in self._interned_values:
            self._interned_values[id(value)] = value, self._interned(self.value(value))
        return self._interned_values[id(value)][1]

    def _interned(self, encoded: Any) -> Any:
        text = repr(encoded)
        if text not in self._entries:
            self._entries[text] = len(self.table)
            self.table.append(encoded)
        return {"#": self._entries[text]}

    def tree(self, tree: pytree.TreeSpec) -> Any:
        """Return the nesting of what ``build()`` returns.

        Raises:
            ArtifactError: it has a container other than a tuple, a list or a dict.
        """
        if tree.is_leaf():
            return None
        kind = next((name for name, cls in _CONTAINERS.items() if tree.type is cls), None)
        if kind is None:
            raise ArtifactError(
                f"build() returns a {tree.type.__name__}, whose class a file cannot refer to\n"
                "Return tensors in tuples, lists and dicts from build() to export its step."
            )
        keys = [self.value(key) for key in tree.context] if kind == "dict" else None
        return [kind, keys, [self.tree(child) for child in tree.children()]]


class Reader:
    """Reads what a :class:`Writer` wrote.

    Args:
        table, tensors: those of the writer.
        accelerator: stands for the accelerator of the rank that wrote the file.

    Attributes:
        mode: the fake mode of all fake tensors.
        sizes: the symbols of dynamic dimensions; set before anything that has some is read.
    """

    def __init__(self, table: Sequence[Any], tensors: Mapping[str, Tensor], accelerator: torch.device | None) -> None:
        self.mode: CachingFakeMode = _torch.fake_mode()
        self.sizes: Sizes | None = None
        self._table, self._tensors, self._accelerator = table, tensors, accelerator
        self._read: dict[int, Any] = {}
        self._numbers: dict[str, torch.SymFloat] = {}
        self._tags: dict[str, Callable[[Any], Any]] = {
            "#": self._entry,
            "float": float,
            "complex": lambda parts: complex(*map(float.fromhex, parts)),
            "torch": _constant,
            "device": self.device,
            "op": operators.function_of,
            "set": lambda entries: {self.value(entry) for entry in entries},
            "Tensor": lambda _: Tensor,
            "size": self._size,
            "fake": self._fake,
        }

    def value(self, encoded: Any, nodes: Sequence[fx.Node] | None = None) -> Any:
        """Return a value.

        Args:
            encoded: what the writer returned.
            nodes: the value is an argument of a node; these are the nodes before it. Else None.
        """
        kind = type(encoded)
        if kind is list:
            return tuple([entry if type(entry) in _PLAIN else self.value(entry, nodes) for entry in encoded])
        if kind is not dict:
            # JSON has numbers, texts and None besides.
            return encoded
        ((tag, content),) = encoded.items()
        if tag == "n" and nodes is not None:
            return nodes[content]
        if tag == "l":
            return [self.value(entry, nodes) for entry in content]
        if tag == "d":
            return {self.value(key): self.value(entry, nodes) for key, entry in content}
        if tag == "slice":
            return slice(*(self.value(entry, nodes) for entry in content))
        if tag in self._tags:
            value = self._tags[tag](content)
            if nodes is None or isinstance(value, _ARGUMENTS):
                return value
        if nodes is not None:
            raise ArtifactError(f"the file has an argument of kind {tag!r:.40}")
        cls = _CLASSES[tag]
        arguments = [self.value(entry) for entry in content]
        if len(arguments) != len(fields(cls)):
            raise ArtifactError(f"the file has a {tag} of {len(arguments)} values")
        try:
            return cls(*arguments)
        except ValueError as error:
            raise ArtifactError(f"the file has a {tag} that cannot be: {error}") from None

    def _entry(self, number: int) -> Any:
        if number not in self._read:
            self._read[number] = self.value(self._table[number])
        return self._read[number]

    def device(self, text: str) -> torch.device:
        """Return the device of this rank that has the place of a device of the file."""
        device = torch.device(text)
        return device if self._accelerator is None or device.type in ("cpu", "meta") else self._accelerator

    def _size(self, description: Any) -> Any:
        environment = _torch.size_env(self.mode)
        symbols: dict[str, Any] = (
            {} if self.sizes is None else {name: self.sizes.symbol(name) for name in self.sizes.inputs}
        )
        for name in _torch.unknown_numbers(description):
            # A hyperparameter of an update, such as the learning rate.
            if name not in self._numbers:
                self._numbers[name] = environment.create_unbacked_symfloat()
            symbols[name] = self._numbers[name]
        return _torch.rebuild_number(description, symbols, environment)

    def _fake(self, content: Any) -> Tensor:
        shape, stride, dtype, device = content
        with self.mode:
            return torch.empty_strided(
                self.value(shape), self.value(stride), dtype=_constant(dtype), device=self.device(device)
            )

    def tensor(self, encoded: Any) -> Tensor:
        """Return a tensor with data."""
        name, shape, stride, device = encoded["data"]
        stored = self._tensors[name]
        distinct = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
        if list(stored.shape) != distinct:
            raise ArtifactError(f"the file's tensor {name} has the shape {tuple(stored.shape)}, not {tuple(distinct)}")
        tensor = torch.empty_strided(distinct, stride, dtype=stored.dtype, device=self.device(device))
        return tensor.copy_(stored).expand(shape)

    def tree(self, encoded: Any) -> pytree.TreeSpec:
        """Return the nesting that :meth:`Writer.tree` wrote."""
        leaves: list[Any] = []

        def built(one: Any) -> Any:
            if one is None:
                leaves.append(0)
                return 0
            kind, keys, children = one
            inner = [built(child) for child in children]
            if kind == "dict":
                return dict(zip(map(self.value, keys), inner, strict=True))
            return _CONTAINERS[kind](inner)

        return pytree.tree_structure(built(encoded))


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _constant(name: str) -> Any:
    """Return the dtype, layout or memory format of a name.

    Raises:
        ArtifactError: there is none.
    """
    constant = getattr(torch, name, None) if operators.IDENTIFIER.fullmatch(name) else None
    if not isinstance(constant, _CONSTANTS):
        raise ArtifactError(f"the file has {name!r:.60}, which is no dtype, layout or memory format of torch")
    return constant
