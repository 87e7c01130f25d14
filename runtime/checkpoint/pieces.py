"""What this rank has of a named tensor, as ``torch.distributed.checkpoint`` asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerograph.runtime.checkpoint.boxes import boxes

Offsets = tuple[int, ...]


@dataclass(eq=False)
class Pieces:
    """This rank's boxes of one tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: in which it is written.
        parts: sizes of each box by its offsets, and where its elements are: a flat tensor, and the first of them there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[Offsets, tuple[tuple[int, ...], Callable[[], Tensor], int]] = field(default_factory=dict)

    def add(self, start: int, end: int, flat: Callable[[], Tensor], at: int, within: Within | None = None) -> None:
        """Elements ``start`` to ``end`` of the flattened tensor lie in ``flat()`` from ``at`` on.

        Args:
            within: they are those of this part of the tensor, flattened.
        """
        inner = self.shape if within is None else within.shape
        for offsets, sizes in boxes(inner, start, end):
            place = offsets if within is None else tuple(a + b for a, b in zip(offsets, within.offsets, strict=True))
            self.parts[place] = (sizes, flat, at)
            at += math.prod(sizes)

    def tensor(self, index: MetadataIndex) -> Tensor:
        """The box at ``index.offset``: a view of where it lies."""
        assert index.offset is not None
        sizes, flat, at = self.parts[tuple(index.offset)]
        return flat()[at : at + math.prod(sizes)].view(sizes)

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:  # the planner's protocol
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), torch.Size(part[0])) for at, part in self.parts.items()]


@dataclass(frozen=True)
class Within:
    """A box of a tensor that is flattened by itself."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class Saving(DefaultSavePlanner):
    """Boxes of tensors, and nothing else: nothing is pickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found: Pieces = self.state_dict[index.fqn]
        return found.tensor(index).to(found.dtype)


class Loading(DefaultLoadPlanner):
    """Boxes into where they lie by now."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Not the default's, which looks for tensors on the meta device and knows no pieces.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Pieces = self.state_dict[index.fqn]
        return found.tensor(index)


def constant(flat: Tensor) -> Callable[[], Tensor]:
    return lambda: flat
