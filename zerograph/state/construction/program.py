"""Represent the construction of a model as data: operators over memories that may not be allocated yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph._torch import OpOverload


@dataclass(eq=False)
class Memory:
    """A storage that the construction uses.

    Attributes:
        number: its index in ``Program.memories``.
        nbytes: its final size in bytes.
        storage: storage of the tensors that the construction sees. It has 0 bytes (is *hollow*) until the end, unless
            ``outside``.
        shape_only: storage on the meta device, for the inference of shapes and strides.
        outside: True if no recorded operator created it: it comes from numpy or Python, or existed before. It has its
            bytes.
    """

    number: int
    nbytes: int
    storage: torch.UntypedStorage
    shape_only: torch.UntypedStorage
    outside: bool = False

    @property
    def device(self) -> torch.device:
        """Return the device of the storage."""
        return self.storage.device


@dataclass(frozen=True)
class Ref:
    """A tensor as a view of a memory; ``offset`` and ``stride`` in elements."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False
    negative: bool = False

    def fills(self, nbytes: int) -> bool:
        """Return whether each byte of a memory of this size belongs to exactly one element of the tensor."""
        if math.prod(self.shape) * self.dtype.itemsize != nbytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


def ref(tensor: Tensor, memory: Memory) -> Ref:
    """Return the tensor as a view of the memory that is its storage."""
    return Ref(
        memory.number,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tensor_at(view: Ref, storage: torch.UntypedStorage) -> Tensor:
    """Return the tensor that is this view of the storage, which must be large enough."""
    plain = torch.empty(0, dtype=view.dtype, device=storage.device)
    plain = plain.set_(storage, view.offset, view.shape, view.stride)
    plain = plain.conj() if view.conjugate else plain
    return _torch.negative_view(plain) if view.negative else plain


@dataclass(frozen=True, eq=False)
class Operation:
    """One operator call.

    Attributes:
        args, kwargs: its arguments, with a :class:`Ref` for each tensor.
        results: for each leaf of its result the view of a memory that the call creates; None for other leaves.
        reads, writes, makes: numbers of the memories that it reads, writes and creates.
        overwrites: the memories among ``writes`` whose previous contents it replaces entirely.
        generator: number of the generator that it draws from; None if it draws nothing.
        default_dtype: torch's default dtype at the call.
        where: the user's line.
    """

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Ref | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    overwrites: frozenset[int]
    generator: int | None
    default_dtype: torch.dtype
    where: str

    @property
    def allocates(self) -> bool:
        """Return whether it only allocates memory: replay allocates at the first write."""
        return self.operator.overloadpacket in _EMPTY


_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.empty_permuted,
}


@dataclass(frozen=True, eq=False)
class Reseed:
    """A change of a generator's state by the user.

    Attributes:
        state: the new state, or None if the user restored one that an earlier entry left.
        after: number of the entry after which the generator had the restored state; -1: its initial state.
    """

    generator: int
    state: Tensor | None
    after: int


@dataclass(frozen=True, eq=False)
class Use:
    """The values that an entry reads, changes in part, and creates.

    Attributes:
        at: the value in each memory that it touches, by the memory's number.
    """

    reads: frozenset[int] = frozenset()
    changes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    at: Mapping[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Program:
    """All recorded entries, in order.

    A *value* is the content of a memory from one overwrite to the next; values are numbered.

    Attributes:
        uses: values that each entry uses.
        memory_of: number of the memory of each value.
        current: the value that each memory holds now, by the memory's number.
        writers: numbers of the entries that create or change each value.
    """

    memories: list[Memory] = field(default_factory=list)
    entries: list[Operation | Reseed] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    memory_of: list[int] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    writers: list[list[int]] = field(default_factory=list)

    def add_memory(
        self, storage: torch.UntypedStorage, shape_only: torch.UntypedStorage, *, outside: bool = False
    ) -> Memory:
        """Add a memory of the size of ``shape_only``."""
        memory = Memory(len(self.memories), shape_only.nbytes(), storage, shape_only, outside)
        self.memories.append(memory)
        if outside:
            self._new_value(memory.number)
        return memory

    def append(self, entry: Operation | Reseed) -> int:
        """Append the entry and return its number."""
        number = len(self.entries)
        self.entries.append(entry)
        if isinstance(entry, Reseed):
            self.uses.append(Use())
            return number
        reads = frozenset(self.current[memory] for memory in entry.reads)
        changes = frozenset(self.current[memory] for memory in entry.writes - entry.overwrites)
        makes = frozenset(self._new_value(memory) for memory in sorted(entry.overwrites | entry.makes))
        touched = entry.reads | entry.writes | entry.makes
        self.uses.append(Use(reads, changes, makes, {memory: self.current[memory] for memory in touched}))
        for value in changes | makes:
            self.writers[value].append(number)
        return number

    def _new_value(self, memory: int) -> int:
        self.memory_of.append(memory)
        self.writers.append([])
        self.current[memory] = len(self.memory_of) - 1
        return self.current[memory]
