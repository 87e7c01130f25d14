"""Construct a model whose tensors are split over the ranks, except those that the running operator uses.

Each rank runs the whole construction as it is written, with equal random numbers. Every storage that an operator
creates is a *memory*. Before an operator runs, the memories that it uses become whole, which is a collective, and the
other large ones are cut: each rank keeps its part, and the storage is *hollow*, which means that it has 0 bytes.
Tensors keep their storages, so every reference to a tensor stays valid. ``Guard`` intercepts methods that read a
storage without the dispatcher.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from zerograph import _torch
from zerograph._torch import OpOverload, TorchDispatchMode, pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.ir.buckets import Bucket
from zerograph.runtime.job.exchange import gather_whole
from zerograph.runtime.job.process_group import Job, agree, digest
from zerograph.runtime.state import provisional_layout, split_part, zero_part
from zerograph.runtime.tensor_hash import hash_bits

aten = torch.ops.aten

_DOING = "constructing the model of sharded_init()"
# Smaller memories stay whole until the end. Cutting them saves little, and making them whole again is a collective.
LEAST_CUT_BYTES = 1 << 16

# Operators that overwrite all elements of their first argument.
_OVERWRITES = {
    *(aten.fill_, aten.zero_, aten.copy_, aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_),
    *(aten.exponential_, aten.cauchy_, aten.log_normal_, aten.geometric_),
}
# Operators whose result has no values yet.
_ALLOCATES = re.compile(r"aten\.(new_)?empty(_like|_strided|_permuted)?")
_COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass(eq=False)
class Memory:
    """A storage that the construction uses.

    Attributes:
        number: equal on all ranks.
        dtype: dtype of the tensor that it was created for.
        outside: True if no operator of the construction created it: it comes from numpy or Python, or existed before.
            It is never cut.
        layout: how it is split while it is hollow, as a bucket of one flat tensor; None: it has never been hollow.
        part: this rank's part while it is hollow; None: no operator has written to it, and its values are zeros.
    """

    number: int
    dtype: torch.dtype
    outside: bool
    layout: Bucket | None = None
    part: Tensor | None = None  # [padded / ranks]


class Construction(TorchDispatchMode):
    """Run the operators that are called inside, and keep all large memories but their operands cut.

    Attributes:
        problem: the error for which the ranks have stopped together, if any: no collective may follow.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.problem: Exception | None = None
        self._job = job
        self._memories: Any = WeakIdKeyDictionary()  # by storage
        self._count = 0
        # The memories that can be cut.
        self._whole: list[weakref.ref[torch.UntypedStorage]] = []
        # All calls so far: equal on all ranks that construct the same model.
        self._lines: list[str] = []
        self._digest = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _torch.plain_tensors():
            return self._run(func, args, kwargs or {})

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of the tensor's storage, or None if no operator of the construction has used it."""
        memory: Memory | None = self._memories.get(tensor.untyped_storage())
        return memory

    def note(self, line: str) -> None:
        """Add a line to those that all ranks must have alike."""
        self._lines.append(line)
        self._digest = digest((self._digest, line))

    def note_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Add a line about each tensor whose memory is not known yet, with its values."""
        for tensor in tensors:
            if not tensor.is_meta and self.memory_of(tensor) is None:
                storage = tensor.untyped_storage()
                memory = self._add(storage, tensor.dtype, outside=True)
                content = f"{storage.nbytes()} bytes {int(hash_bits(_flat(storage, torch.uint8)))}"
                self.note(f"memory {memory.number}: from outside of the construction, {content}")

    def agree(self, problem: BaseException | None = None) -> None:
        """Check that all ranks have made the same calls. A collective.

        Args:
            problem: an error of this rank.
        """
        with self._stopping():
            agree(self._job, _DOING, self._digest, self._facts, problem)

    def make_whole(self, storage: torch.UntypedStorage, *, overwritten: bool = False) -> None:
        """Give a hollow storage its bytes. A collective unless its values are not needed or were never written.

        Args:
            overwritten: the caller overwrites all values.
        """
        memory: Memory = self._memories[storage]
        if storage.nbytes() or memory.layout is None:
            return
        values: Tensor | None = None
        if memory.part is not None and not overwritten:
            self.agree()
            with self._stopping():
                # All backends send bytes.
                values = gather_whole(self._job, memory.part.view(torch.uint8), memory.layout.sbp).view(memory.dtype)
        memory.part = None
        storage.resize_(memory.layout.numel * memory.dtype.itemsize)
        if values is not None:
            _flat(storage, memory.dtype).copy_(values[: memory.layout.numel])
        elif not overwritten:
            # Plain construction would see uninitialized memory here; zeros are equal on all ranks.
            _flat(storage, memory.dtype).zero_()
        self._whole.append(weakref.ref(storage))

    def part(self, tensor: Tensor, layout: Bucket) -> Tensor:
        """Return this rank's part of a tensor. A collective if its memory is cut in another way.

        Args:
            layout: a bucket of this tensor alone.
        """
        storage = tensor.untyped_storage()
        memory: Memory = self._memories[storage]
        self._cut({_torch.storage_key(storage)})
        if not storage.nbytes() and _is_all(tensor, memory):
            return zero_part(self._job, layout) if memory.part is None else memory.part
        self.make_whole(storage)
        return split_part(self._job, layout, tensor)

    def created(self) -> dict[Memory, torch.UntypedStorage]:
        """Return the storages of the memories that the construction has created and that are alive, in order."""
        pairs = [(memory, storage) for storage, memory in self._memories.items() if not memory.outside]
        return dict(sorted(pairs, key=lambda pair: pair[0].number))

    def _facts(self) -> dict[str, str]:
        return {f"line {number} of the construction": line for number, line in enumerate(self._lines)}

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Remember an error inside, of which the other ranks know."""
        try:
            yield
        except Exception as error:
            self.problem = error
            raise

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.problem is not None:
            # The construction has caught it.
            raise self.problem
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _check_plain(func, inputs)
        if func.namespace in _COLLECTIVES:
            raise _unsupported(func, "it sends values to other ranks")
        self.note_tensors(inputs)
        arguments = pytree.tree_map(self.shown, (list(args), dict(kwargs)))
        self.note(f"{func} {arguments}, default dtype {torch.get_default_dtype()}")
        storages = [tensor.untyped_storage() for tensor in inputs if not tensor.is_meta]
        # copy.deepcopy() gives storages to set_().
        storages += [leaf for leaf in leaves if isinstance(leaf, torch.UntypedStorage) and leaf in self._memories]
        used = {_torch.storage_key(storage): storage for storage in storages}
        self._cut(used)
        with self._opened(used.values()) if func.is_view else contextlib.nullcontext():
            if not func.is_view:
                overwritten = self._overwritten(func, args, inputs)
                for storage in used.values():
                    self.make_whole(storage, overwritten=storage is overwritten)
            result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._take_result(func, leaf)
        return result

    def _take_result(self, func: OpOverload, result: Tensor) -> None:
        """Add the memory of an operator's result, if it is new."""
        if result.layout != torch.strided:
            raise _unsupported(func, f"it returns a tensor of layout {result.layout}")
        storage = result.untyped_storage()
        if storage in self._memories:
            return
        memory = self._add(storage, result.dtype, outside=not storage.resizable())
        if memory.outside:
            return
        if _ALLOCATES.fullmatch(str(func.overloadpacket)):
            memory.layout = provisional_layout(
                self._job, [storage.nbytes() // result.itemsize], memory.dtype, storage.device
            )
            storage.resize_(0)
        else:
            self._whole.append(weakref.ref(storage))

    def _add(self, storage: torch.UntypedStorage, dtype: torch.dtype, *, outside: bool) -> Memory:
        self._memories[storage] = memory = Memory(self._count, dtype, outside)
        self._count += 1
        return memory

    def _overwritten(
        self, func: OpOverload, args: Sequence[Any], inputs: Sequence[Tensor]
    ) -> torch.UntypedStorage | None:
        """Return the storage of which the operator overwrites all bytes without reading any."""
        if func.overloadpacket not in _OVERWRITES or args[0].is_meta:
            return None
        storage: torch.UntypedStorage = args[0].untyped_storage()
        memory = self._memories[storage]
        # x.copy_(x) reads the memory that it writes.
        once = sum(not tensor.is_meta and tensor.untyped_storage() is storage for tensor in inputs) == 1
        return storage if once and _is_all(args[0], memory) else None

    def _cut(self, used: Collection[int]) -> None:
        """Cut all large memories but those ``used``, by the key of their storages. No collective."""
        if self._job.mesh.shape[-1] == 1:
            return
        whole, self._whole = self._whole, []
        for reference in whole:
            storage = reference()
            if storage is None or storage.nbytes() < LEAST_CUT_BYTES:
                continue
            if _torch.storage_key(storage) in used:
                self._whole.append(reference)
                continue
            memory = self._memories[storage]
            flat = _flat(storage, memory.dtype)
            memory.layout = provisional_layout(self._job, flat.shape, flat.dtype, flat.device)
            memory.part = split_part(self._job, memory.layout, flat)
            del flat
            storage.resize_(0)

    @contextlib.contextmanager
    def _opened(self, storages: Collection[torch.UntypedStorage]) -> Iterator[None]:
        """Give hollow storages their size inside, without values: torch creates no view of a too small storage."""
        hollow = [storage for storage in storages if not storage.nbytes()]
        for storage in hollow:
            memory = self._memories[storage]
            storage.resize_(0 if memory.layout is None else memory.layout.numel * memory.dtype.itemsize)
        try:
            yield
        finally:
            for storage in hollow:
                storage.resize_(0)

    def shown(self, value: Any) -> Any:
        """Return a text that is equal on all ranks: without device indices, since ranks have GPUs of their own."""
        if isinstance(value, Tensor):
            memory = None if value.is_meta else self.memory_of(value)
            place = "the meta device" if memory is None else f"memory {memory.number}"
            offset = value.storage_offset()
            return f"{value.dtype} {tuple(value.shape)} of {place} at {offset} by {tuple(value.stride())}"
        if isinstance(value, torch.device):
            return value.type
        return type(value).__name__ if isinstance(value, (torch.Generator, torch.UntypedStorage)) else value


class Guard(TorchFunctionMode):
    """Make tensors whole for methods that bypass the dispatcher, and refuse methods that keep the memory."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and func in _GUARDED and (memory := self._memory(tensor)) is not None:
            if func in _REFUSED:
                raise CaptureError(
                    f"the construction calls Tensor.{func.__name__} at\n  {'   '.join(source.running_line())}\n"
                    "Tensors have no memory of their own until the end of sharded_init(). Call it after the block, or "
                    "construct the model outside of sharded_init()."
                )
            if func is Tensor.data_ptr:
                # Distinguishes memories as an address does, and is higher than any real address.
                address = (1 << 62) + (memory.number << 41) + tensor.storage_offset() * tensor.element_size()
                return address if tensor.numel() else 0
            if func is Tensor.__repr__:
                # Values could need the other ranks, and one rank alone may print.
                shape, dtype = tuple(tensor.shape), tensor.dtype
                return f"Tensor(shape={shape}, dtype={dtype}, split until the end of sharded_init())"
            # Without the construction's modes too: these calls are not a part of it.
            with _torch.plain_tensors(), _torch.no_modes():
                self._construction.note(f"{func.__name__} of memory {memory.number}")
                self._construction.make_whole(tensor.untyped_storage())
                # What numpy() returns would refer to the memory.
                values = tensor.detach().clone() if func in _ALIASES else tensor
                return func(values, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _memory(self, tensor: Tensor) -> Memory | None:
        with _torch.plain_tensors():
            if tensor.is_meta or tensor.layout != torch.strided:
                return None
            memory = self._construction.memory_of(tensor)
            return None if memory is None or memory.outside else memory


_ALIASES: set[Any] = {Tensor.numpy, Tensor.__array__}
_REFUSED = {Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.__dlpack__, Tensor.storage, Tensor.untyped_storage}
_GUARDED = {*_ALIASES, *_REFUSED, Tensor.tolist, Tensor.data_ptr, Tensor.__repr__, Tensor.__deepcopy__}


def _flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Return the whole storage as a 1-D tensor."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _is_all(tensor: Tensor, memory: Memory) -> bool:
    """Return whether the tensor has all elements of a memory that has been hollow, in order."""
    plain = tensor.is_contiguous() and tensor.dtype == memory.dtype and not tensor.is_conj() and not tensor.is_neg()
    return plain and memory.layout is not None and tensor.numel() == memory.layout.numel


def _check_plain(func: OpOverload, inputs: Sequence[Tensor]) -> None:
    """Check that the inputs are strided tensors without a dispatch of their own."""
    for tensor in inputs:
        if tensor.layout != torch.strided:
            raise _unsupported(func, f"it has an argument of layout {tensor.layout}")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise _unsupported(func, f"it has an argument of class {type(tensor).__name__}")


def _unsupported(func: OpOverload, why: str) -> CaptureError:
    return CaptureError(
        f"the construction calls {func}, which sharded_init() cannot split: {why}\n"
        f"  {'   '.join(source.running_line())}\n"
        "Construct this part of the model outside of sharded_init(), or make the call after the block."
    )
