"""What the construction of a model does, as data: operators over memories, which need not exist yet."""

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
    """A storage that construction uses.

    Attributes:
        number: its name.
        nbytes: as large as it is to be.
        storage: what the tensors of construction lie in. Until the end it is of 0 bytes (*hollow*), unless ``outside``.
        shape_only: the same on the meta device: there shapes and strides of results are found out.
        outside: not made by a recorded operator: what came from numpy or Python, or was there before. It has its bytes.
    """

    number: int
    nbytes: int
    storage: torch.UntypedStorage
    shape_only: torch.UntypedStorage
    outside: bool = False

    @property
    def device(self) -> torch.device:
        return self.storage.device


@dataclass(frozen=True)
class Ref:
    """A tensor in a memory; ``offset`` and ``stride`` in elements."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False
    negative: bool = False

    def fills(self, nbytes: int) -> bool:
        """Whether each byte of a memory of that size belongs to exactly one of its elements."""
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
    """How a tensor lies in the memory that is its storage."""
    return Ref(
        memory.number,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tensor_at(found: Ref, storage: torch.UntypedStorage) -> Tensor:
    """The tensor that lies so in a storage, which must be large enough, and on whose device it is."""
    plain = torch.empty(0, dtype=found.dtype, device=storage.device)
    plain = plain.set_(storage, found.offset, found.shape, found.stride)
    plain = plain.conj() if found.conjugate else plain
    return _torch.negative_view(plain) if found.negative else plain


@dataclass(frozen=True, eq=False)
class Operation:
    """One operator call.

    Attributes:
        args, kwargs: with a :class:`Ref` for each tensor.
        results: of its flattened result what lies in a memory that it makes; None for the rest.
        reads, writes, makes: numbers of memories. What it overwrites without a look it does not read.
        overwrites: of those it writes, the ones of which nothing remains that was there before.
        generator: number of the generator that it draws from; None if it draws nothing.
        default_dtype: what an operator that is told no dtype makes.
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
        """It makes memory without values: nothing has to be done before somebody writes to that."""
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
    """The user put a generator into another state: one given as bytes, or that after an earlier entry that drew.

    Attributes:
        after: number of that entry; -1: the state when recording began.
    """

    generator: int
    state: Tensor | None
    after: int


@dataclass(frozen=True, eq=False)
class Use:
    """What an entry does with values: it reads them, changes parts of them, or makes them.

    ``at`` is the value in each memory that it touches, by number.
    """

    reads: frozenset[int] = frozenset()
    changes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    at: Mapping[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Program:
    """Everything recorded so far, in order.

    A *value* is what a memory holds from one overwriting to the next.

    Attributes:
        uses: what each entry does with values.
        memory_of: the memory of each value.
        current: the value that each memory holds now.
        writers: the entries that make or change each value.
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
        """A memory as large as ``shape_only``."""
        memory = Memory(len(self.memories), shape_only.nbytes(), storage, shape_only, outside)
        self.memories.append(memory)
        if outside:
            self._new_value(memory.number)
        return memory

    def append(self, entry: Operation | Reseed) -> int:
        """Record the entry; returns its number."""
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
