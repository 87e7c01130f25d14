"""Describe a rank's boxes of named tensors to ``torch.distributed.checkpoint``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint.boxes import boxes

Offsets = tuple[int, ...]


@dataclass(eq=False)
class Pieces:
    """Boxes of one tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        dtype: of the tensor in the checkpoint.
        parts: by the offsets of each box its sizes, a function that returns a 1-D tensor with its elements, and the
            index of the first of them there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[Offsets, tuple[tuple[int, ...], Callable[[], Tensor], int]] = field(default_factory=dict)

    def add(self, start: int, end: int, flat: Callable[[], Tensor], at: int, within: Within | None = None) -> None:
        """Add the boxes of a range of the flattened tensor.

        Args:
            start, end: the range, in elements.
            flat: returns the 1-D tensor that holds the elements.
            at: the index of the first element in that tensor.
            within: the range is one of this flattened box, not of the whole tensor.
        """
        inner = self.shape if within is None else within.shape
        for offsets, sizes in boxes(inner, start, end):
            if within is not None:
                offsets = tuple(inner + outer for inner, outer in zip(offsets, within.offsets, strict=True))
            self.parts[offsets] = (sizes, flat, at)
            at += math.prod(sizes)

    def tensor(self, index: MetadataIndex) -> Tensor:
        """Return a view of the box at ``index.offset``."""
        assert index.offset is not None
        sizes, flat, at = self.parts[tuple(index.offset)]
        return flat()[at : at + math.prod(sizes)].view(sizes)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor; part of the planner's protocol."""
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

    def reads(self, name: str, stored: TensorStorageMetadata) -> list[ReadItem]:
        """Return what to read of the boxes in a checkpoint.

        Args:
            name: the tensor's name there.
            stored: its boxes there.
        """
        return create_read_items_for_chunk_list(name, stored, self.__create_chunk_list__())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(part[0])) for offsets, part in self.parts.items()]


@dataclass(frozen=True)
class Within:
    """A box of a tensor, flattened by itself.

    Attributes:
        offsets: of the box in the tensor.
        shape: of the box.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class PieceSavePlanner(DefaultSavePlanner):
    """Save :class:`Pieces` and nothing else: nothing is pickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Keep this rank's plan; return the number of elements that it writes of each tensor, for the first rank."""
        self._own = super().create_local_plan()
        counts = dict.fromkeys(self.state_dict, 0)
        for item in self._own.items:
            assert item.tensor_data is not None
            counts[item.index.fqn] += math.prod(item.tensor_data.chunk.sizes)
        return SavePlan([], planner_data=numpy.fromiter(counts.values(), numpy.int64))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return shape and dtype of each tensor; runs on the first rank. All ranks name the same tensors in one order.

        No two ranks write the same box. torch looks for such boxes one by one: for thousands of ranks that takes
        minutes, and so does sending them.

        Raises:
            CheckpointError: the boxes of a tensor have more or fewer elements than the tensor.
        """
        written = sum(plan.planner_data for plan in all_plans)
        for (name, pieces), count in zip(self.state_dict.items(), written, strict=True):
            if count != math.prod(pieces.shape):
                raise CheckpointError(f"the ranks hold {count} elements of {name}, whose shape is {pieces.shape}")
        tensors: dict[str, Any] = {
            name: TensorStorageMetadata(TensorProperties(dtype=pieces.dtype), pieces.size(), [])
            for name, pieces in self.state_dict.items()
        }
        self.global_plan, self.metadata = all_plans, Metadata(tensors)
        return all_plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's plan."""
        self.plan = self._own
        return self._own

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the box in the dtype of the checkpoint."""
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.tensor(index).to(pieces.dtype)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Load boxes into the memory that :class:`Pieces` view."""

    def __init__(self, stored: Callable[[str], TensorStorageMetadata]) -> None:
        """Create a planner.

        Args:
            stored: returns the boxes of a tensor of the checkpoint.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = stored

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state dict as it is; the default's method does not know :class:`Pieces`."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Keep this rank's plan, which the first rank does not need."""
        self._own = LoadPlan(
            [item for name in self.state_dict for item in self.state_dict[name].reads(name, self._boxes(name))]
        )
        return LoadPlan([])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan."""
        return self._own

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return a view of the box to fill."""
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.tensor(index)


def flat_of(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the elements of a contiguous tensor."""
    flat = tensor.detach().view(-1)
    return lambda: flat
