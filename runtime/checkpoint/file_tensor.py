"""Tensors whose values stay in safetensors files until they are needed, and then are read in rows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Container, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import cache
from zerograph.errors import CheckpointError

aten = torch.ops.aten

# Returns the rows ``low`` to ``high`` of a tensor along dimension 0; of a 0-d tensor the tensor itself.
ReadRows = Callable[[int, int], Tensor]

# Bytes that one read of :meth:`FileTensor.copy_flat` returns at most, unless a single row is larger.
BLOCK_BYTES = 2**25

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# By their names in safetensors files.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class _Content:
    """The values of a tensor, shared with its aliases: in memory, or still to be read.

    Attributes:
        part: of a view the tensor that it is a part of, the start, the size and the dimension.
        lasting: addresses of memory that keeps its values until they are read.
    """

    part: tuple[FileTensor, int, int, int] | None = None

    def __init__(self, read: ReadRows | None, value: Tensor | None = None, lasting: Container[int] = ()) -> None:
        self.read, self.value, self.lasting = read, value, lasting


class FileTensor(Tensor):
    """A tensor that holds no values: it reads them, row by row, when they are needed.

    Casts, ``stack``, ``cat`` and ``split`` return such tensors again, so what transformers does to convert a checkpoint
    reads nothing. ``copy_`` to such a tensor makes it read from the source. Any other operator reads the whole tensor
    and keeps it in memory: in-place writes and views have their usual effect.
    """

    _content: _Content

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        read: ReadRows | None,
        device: torch.device | None = None,
        lasting: Container[int] = (),
    ) -> FileTensor:
        """Create a tensor with these values; without ``read`` they are uninitialized until something is copied.

        What is copied from memory whose address is in ``lasting`` is read when it is needed, other memory at once.
        """
        made: FileTensor = _torch.tensor_without_data(
            cls, tuple(shape), dtype, device or torch.device("cpu"), requires_grad=False
        )
        made._content = _Content(read, None, lasting)
        return made

    def rows(self, low: int, high: int) -> Tensor:
        """Return the rows along dimension 0. They are not kept in memory."""
        content, device = self._content, self.device
        if content.value is not None:
            return content.value if not self.dim() else content.value[low:high]
        if not self.numel() or content.read is None:
            shape = self.shape if not self.dim() else (high - low, *self.shape[1:])
            return torch.empty(shape, dtype=self.dtype, device=device)
        return content.read(low, high).to(device)

    def whole(self) -> Tensor:
        """Return all values. They are not kept in memory."""
        return self.rows(0, self.shape[0] if self.dim() else 1)

    def copy_flat(self, target: Tensor, start: int) -> None:
        """Overwrite a 1-D tensor with elements from ``start`` on, in row-major order, a block of rows at a time."""
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-(start + len(target)) // row)
        block = max(1, BLOCK_BYTES // max(1, row * self.dtype.itemsize))
        for low in range(first, last, block):
            values = self.rows(low, min(low + block, last)).reshape(-1)
            begin, end = max(start, low * row), min(start + len(target), low * row + len(values))
            target[begin - start : end - start] = values[begin - low * row : end - low * row]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FileTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], FileTensor):
            value = args[1].detach()
            args[0]._content = value._content if isinstance(value, FileTensor) else _Content(None, value)
            return None
        with _torch.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        if result is not NotImplemented:
            return result
        values = func(*pytree.tree_map(_in_memory, list(args)), **pytree.tree_map(_in_memory, dict(kwargs)))
        # An in-place operator returns its first argument.
        own = args[0]._content.value if args and isinstance(args[0], FileTensor) else None
        return args[0] if own is not None and values is own else values


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _in_memory(value: Any) -> Any:
    """Read a tensor and keep it in memory, for operators that may write to it or return a view."""
    if not isinstance(value, FileTensor):
        return value
    content = value._content
    if content.value is None and content.part is not None:
        whole, start, size, dim = content.part
        content.value = _in_memory(whole).narrow(dim, start, size)
    elif content.value is None:
        content.value = value.whole()
    return content.value


def _is_unread(tensor: FileTensor) -> bool:
    """Return whether no operator can have written to the values."""
    content = tensor._content
    return content.value is None and (content.part is None or _is_unread(content.part[0]))


def _as_now(tensor: FileTensor) -> FileTensor:
    """Return an unread tensor apart from this one: what is written to this one later is not in it."""
    if (part := tensor._content.part) is not None:
        return _part(_as_now(part[0]), *part[1:])
    return FileTensor(tensor.shape, tensor.dtype, tensor._content.read, tensor.device)


def _detach(tensor: FileTensor) -> FileTensor:
    alias = FileTensor(tensor.shape, tensor.dtype, None, tensor.device)
    alias._content = tensor._content
    return alias


def _cast(tensor: FileTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if not _is_unread(tensor):
        return NotImplemented
    dtype, source = dtype or tensor.dtype, _as_now(tensor)
    device = tensor.device if device is None else torch.device(device)
    return FileTensor(tensor.shape, dtype, lambda low, high: source.rows(low, high).to(dtype), device)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    dim %= first.dim() + 1
    if not _are_alike(tensors) or any(tensor.shape != first.shape for tensor in tensors) or not first.dim():
        return NotImplemented
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])

    def read(low: int, high: int) -> Tensor:
        if dim == 0:
            return torch.stack([tensor.whole() for tensor in files[low:high]])
        return torch.stack([tensor.rows(low, high) for tensor in files], dim)

    files: list[Any] = list(map(_as_now, tensors))  # type: ignore[arg-type]
    return FileTensor(shape, first.dtype, read, first.device)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    if not _are_alike(tensors) or not first.dim() or any(tensor.dim() != first.dim() for tensor in tensors):
        return NotImplemented
    dim %= first.dim()
    shape = [*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]]
    files: list[Any] = list(map(_as_now, tensors))  # type: ignore[arg-type]

    def read(low: int, high: int) -> Tensor:
        if dim:
            return torch.cat([tensor.rows(low, high) for tensor in files], dim)
        starts = list(accumulate((tensor.shape[0] for tensor in files), initial=0))
        parts = [
            tensor.rows(max(low - start, 0), min(high, end) - start)
            for tensor, (start, end) in zip(files, pairwise(starts), strict=True)
            if max(low, start) < min(high, end)
        ]
        return torch.cat(parts)

    return FileTensor(shape, first.dtype, read, first.device)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Return True if all values are still to be read, of one dtype and device."""
    first = tensors[0]
    return all(
        isinstance(tensor, FileTensor)
        and _is_unread(tensor)
        and (tensor.dtype, tensor.device) == (first.dtype, first.device)
        for tensor in tensors
    )


def _split(tensor: FileTensor, size: int, dim: int = 0) -> Any:
    total = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, total - low) for low in range(0, total, size)], dim)


def _split_with_sizes(tensor: FileTensor, sizes: Sequence[int], dim: int = 0) -> Any:
    dim %= tensor.dim()
    starts = accumulate(sizes, initial=0)
    return [_part(tensor, start, size, dim) for start, size in zip(starts, sizes, strict=False)]


def _part(tensor: FileTensor, start: int, size: int, dim: int) -> FileTensor:
    whole = _detach(tensor)

    def read(low: int, high: int) -> Tensor:
        return whole.rows(low, high).narrow(dim, start, size) if dim else whole.rows(low + start, high + start)

    part = FileTensor((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), tensor.dtype, read, tensor.device)
    part._content.part = whole, start, size, dim
    return part


def _equal(first: Tensor, second: Tensor) -> Any:
    """Compare a block of rows at a time."""
    if not (isinstance(first, FileTensor) and isinstance(second, FileTensor)) or not first.dim():
        return NotImplemented
    if first.shape != second.shape:
        return False
    block = max(1, BLOCK_BYTES // max(1, math.prod(first.shape[1:]) * first.dtype.itemsize))
    starts = range(0, first.shape[0], block)
    spans = [(low, min(low + block, first.shape[0])) for low in starts]
    return all(torch.equal(first.rows(*span), second.rows(*span)) for span in spans)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, FileTensor):
        assert isinstance(source, FileTensor)
        return target.copy_(source.whole())
    expanded = source if source.shape == target.shape else source.expand(target.shape)
    if target._content.part is not None or not _is_unread(target):
        # Views of it see what is copied.
        _in_memory(target).copy_(expanded.whole() if isinstance(expanded, FileTensor) else expanded)
    elif isinstance(expanded, FileTensor):
        source = expanded.to(target.dtype, copy=True)
        if isinstance(source, FileTensor):
            target._content.read = source._content.read
        else:
            target._content.value = source
    else:
        values = expanded.detach()
        if type(values) is Tensor and values.untyped_storage().data_ptr() not in target._content.lasting:
            values = values.clone()
        target._content.read = lambda low, high: (values[low:high] if values.dim() else values).to(target.dtype)
    return target


_RULES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten._to_copy.default: _cast,
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.equal.default: _equal,
    aten.copy_.default: _copy,
}


class OpenFile:
    """A safetensors file, opened to be read in slices."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with cache.opened(self.path):
                # Reads into memory that it allocates. A mapped file would count as memory of the process.
                self._file = safe_open(self.path, framework="pt", device="cpu", backend="pread")
        except TypeError:
            # Before safetensors 0.8.
            self._file = safe_open(self.path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def names(self) -> list[str]:
        """Return the names of the file's tensors."""
        return list(self._file.keys())

    def get_tensor(self, name: str) -> FileTensor:
        """Return a tensor of the file, without reading it.

        Raises:
            CheckpointError: the tensor has a dtype that torch does not have.
        """
        entry = self._file.get_slice(name)
        dtype, shape = entry.get_dtype(), entry.get_shape()
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has the dtype {dtype}, which cannot be loaded")

        def read(low: int, high: int) -> Tensor:
            try:
                values: Tensor = entry[low:high] if shape else self._file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
            return values

        return FileTensor(shape, DTYPES[dtype], read)


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Open safetensors files and return their tensors by name, without reading values.

    A tensor is read when it is used. In ``step.load_state_dict({"modules": {"model": ...}})`` each rank reads its own
    rows only. Names may be changed in the dict.

    Args:
        path: a file ``.safetensors``, an index ``.safetensors.index.json``, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``.

    Raises:
        CheckpointError: there are no such files, or one is damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"{path!r:.60} is not a path of safetensors files")
    tensors: dict[str, Tensor] = {}
    files, by_name = _files(Path(path))
    for file in map(OpenFile, files):
        # Of a tensor that stands in several files the index says which one counts.
        names = [name for name in file.names() if by_name.get(name, file.path) == file.path]
        tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files of a checkpoint, in order of their names, and the file of each tensor by an index."""
    if path.is_dir():
        single, path = path / SINGLE, path / INDEX
        if not path.exists():
            if not single.exists():
                raise CheckpointError(f"{single.parent} has neither {SINGLE} nor {INDEX}")
            return [single], {}
    if path.suffix != ".json":
        return [path], {}
    try:
        by_name = {name: path.parent / file for name, file in json.loads(cache.read(path))["weight_map"].items()}
        return sorted(set(by_name.values())), by_name
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error
