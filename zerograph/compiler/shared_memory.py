"""Memory that two members of a graph share without being one tensor: the graph would take them apart unseen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph import _torch
from zerograph.compiler.members import Members
from zerograph.errors import ConfigError


def check_shared_memory(members: Members) -> None:
    """What is trained must have its memory to itself; parts of one large tensor that do not overlap have.

    Raises:
        ConfigError: a trainable parameter overlaps another member; both are named.
    """
    # A parameter whose values are split between the ranks has one element, of its own.
    with _torch.without_torch_function():
        spans = sorted(_spans(members), key=lambda one: one.begin)
        reaching: list[_Span] = []
        for span in spans:
            reaching = [one for one in reaching if one.end > span.begin]
            for one in reaching:
                if (one.tensor.requires_grad or span.tensor.requires_grad) and _overlap(one, span):
                    raise ConfigError(
                        f"{one.name} and {span.name} lie in the same memory, but are two tensors: a graph gives "
                        "parameters memory of their own, and what it makes of the one the other would not see\n"
                        "Tie parameters by making them one (b.weight = a.weight, without .data). Let a buffer be a "
                        "copy (.clone()), or compute it in forward()."
                    )
            reaching.append(span)


@dataclass(frozen=True, eq=False)
class _Span:
    """A tensor from the address of its first byte to that behind its last."""

    begin: int
    end: int
    name: str
    tensor: Tensor


def _spans(members: Members) -> Iterator[_Span]:
    for name, tensor in (*members.parameters.items(), *members.buffers.items()):
        if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided or isinstance(tensor, DTensor):
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        yield _Span(begin, begin + (last + 1) * tensor.element_size(), name, tensor)


def _overlap(one: _Span, other: _Span) -> bool:
    """Whether any byte is in both: columns of one matrix, say, reach across each other without that."""
    if one.tensor.device != other.tensor.device:
        return False
    if one.begin == other.begin or (one.tensor.is_contiguous() and other.tensor.is_contiguous()):
        return True
    start = min(one.begin, other.begin)
    marks = torch.zeros(max(one.end, other.end) - start, dtype=torch.bool, device="cpu")
    _bytes(marks, one, start).fill_(True)
    return bool(_bytes(marks, other, start).any())


def _bytes(marks: Tensor, span: _Span, start: int) -> Tensor:
    """Of ``marks``, one for each byte from ``start`` on, those that are in the tensor."""
    size = span.tensor.element_size()
    # What is expanded is there once.
    dims = [(n, stride) for n, stride in zip(span.tensor.shape, span.tensor.stride(), strict=True) if stride]
    shape, strides = [n for n, _ in dims], [stride * size for _, stride in dims]
    return marks.as_strided([*shape, size], [*strides, 1], span.begin - start)
