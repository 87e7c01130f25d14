"""Check that members of a graph do not share memory without being one tensor: the graph would separate them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.compiler.members import Members
from zerograph.errors import ConfigError
from zerograph.ir.sbp import is_dtensor


def check_shared_memory(members: Members) -> None:
    """Check that no trainable parameter shares memory with another member.

    Parts of one large tensor that do not overlap share none.

    Raises:
        ConfigError: a trainable parameter overlaps another member; names both.
    """
    # A parameter whose values are split between ranks has one element, in memory of its own.
    with _torch.without_torch_function():
        spans = sorted(_spans(members), key=lambda span: span.begin)
        open_spans: list[_Span] = []
        for span in spans:
            open_spans = [other for other in open_spans if other.end > span.begin]
            for other in open_spans:
                if (other.tensor.requires_grad or span.tensor.requires_grad) and _overlap(other, span):
                    raise ConfigError(
                        f"{other.name} and {span.name} share memory, but are two tensors: a graph gives each parameter "
                        "its own memory, so an update of one would not change the other\n"
                        "Tie parameters by making them one (b.weight = a.weight, without .data). Make a buffer a copy "
                        "(.clone()), or compute it in forward()."
                    )
            open_spans.append(span)


@dataclass(frozen=True, eq=False)
class _Span:
    """A tensor's memory: the addresses ``begin <= address < end``."""

    begin: int
    end: int
    name: str
    tensor: Tensor


def _spans(members: Members) -> Iterator[_Span]:
    for name, tensor in (*members.parameters.items(), *members.buffers.items()):
        if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided or is_dtensor(tensor):
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        yield _Span(begin, begin + (last + 1) * tensor.element_size(), name, tensor)


def _overlap(first: _Span, second: _Span) -> bool:
    """Return True if any byte is in both tensors. Spans of two columns of a matrix intersect, but share no byte."""
    if first.tensor.device != second.tensor.device:
        return False
    if first.begin == second.begin or (first.tensor.is_contiguous() and second.tensor.is_contiguous()):
        return True
    start = min(first.begin, second.begin)
    marks = torch.zeros(max(first.end, second.end) - start, dtype=torch.bool, device="cpu")
    _bytes(marks, first, start).fill_(True)
    return bool(_bytes(marks, second, start).any())


def _bytes(marks: Tensor, span: _Span, start: int) -> Tensor:
    """Return the view of ``marks``, one mark per byte from ``start`` on, that covers the tensor's bytes."""
    size = span.tensor.element_size()
    # A dimension of stride 0 is expanded: its bytes exist once.
    dims = [(n, stride) for n, stride in zip(span.tensor.shape, span.tensor.stride(), strict=True) if stride]
    shape, strides = [n for n, _ in dims], [stride * size for _, stride in dims]
    return marks.as_strided([*shape, size], [*strides, 1], span.begin - start)
