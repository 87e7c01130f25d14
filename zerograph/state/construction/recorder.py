"""Record the construction of a model: each operator becomes an entry of a program, and none runs.

The construction gets tensors of the expected device, shape and class. Their storages are *hollow*: they have 0 bytes
and are filled in place at the end, so every reference to a tensor stays valid. (Tensors on the meta device would have
the wrong device and identity, fake tensors the wrong class.) ``Guard`` intercepts methods that read a storage without
the dispatcher.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import OpOverload, TorchDispatchMode, pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.state.construction.generators import Generators, default_generator
from zerograph.state.construction.program import Memory, Operation, Program, Ref, ref, tensor_at
from zerograph.state.construction.replay import Draws, values_now

aten = torch.ops.aten

# Operators that overwrite all elements of their first argument.
_OVERWRITES = {
    aten.fill_,
    aten.zero_,
    aten.copy_,
    aten.normal_,
    aten.uniform_,
    aten.random_,
    aten.bernoulli_,
    aten.exponential_,
    aten.cauchy_,
    aten.log_normal_,
    aten.geometric_,
}
_SETS = {aten.set_, aten.detach_}
_COLLECTIVES = {"c10d", "_c10d_functional"}
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recorder(TorchDispatchMode):
    """Record the operators that are called inside into ``program``, and the draws from ``generators``."""

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self.program = Program()
        self.generators = generators
        self._draws = Draws(self.program, generators)
        self._by_storage: dict[int, Memory] = {}
        self._by_shape: dict[int, Memory] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _torch.plain_tensors():
            return self._dispatched(func, args, dict(kwargs or {}))

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of the tensor's storage, or None if no recorded operator has used it."""
        return self._by_storage.get(_torch.storage_key(tensor.untyped_storage()))

    def take_in(self, tensor: Tensor) -> Memory:
        """Return the memory of the tensor's storage; add it as one from outside, with its bytes, if it is new."""
        if (memory := self.memory_of(tensor)) is not None:
            return memory
        storage = tensor.untyped_storage()
        return self._remember(storage, _on_meta(storage.nbytes()), outside=True)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the tensor's current values."""
        memory = self.memory_of(tensor)
        if memory is None:
            return tensor
        return values_now(self.program, ref(tensor, memory), self._draws)

    def note_reseeds(self) -> None:
        """Record the user's changes of the generators' states since the last draw."""
        for number in range(len(self.generators.watched)):
            self._note_reseed(number)

    def _note_reseed(self, number: int) -> None:
        if (reseed := self.generators.take_reseed(number)) is not None:
            self.program.append(reseed)

    def _dispatched(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _check_plain(func, inputs)
        if func.namespace in _COLLECTIVES:
            raise _unsupported(func, "it sends values to other ranks")
        memories = [self.take_in(tensor) for tensor in inputs if not tensor.is_meta]
        if func.overloadpacket in _SETS or torch.Tag.inplace_view in func.tags:
            # These change the tensor's view of its memory, not the memory.
            if func.overloadpacket is aten.resize_:
                raise _unsupported(func, "it changes the size of a tensor")
            with _opened(memories):
                return func(*args, **kwargs)
        if _stays_on_meta(func, args, kwargs, inputs):
            metas = {id(tensor): self._shape_only(tensor) for tensor in inputs}
            on_meta = "meta" if kwargs.get("device") is not None else None
            return func(*_replaced(args, metas), **_replaced(kwargs, metas, device=on_meta))
        if torch.Tag.data_dependent_output in func.tags:
            real = {id(tensor): self.value(tensor) for tensor in inputs}
            return func(*_replaced(args, real), **_replaced(kwargs, real))
        metas = {id(tensor): self._shape_only(tensor) for tensor in inputs}
        result = self._inferred(func, args, kwargs, inputs, metas)
        for tensor in inputs:
            meta, memory = metas[id(tensor)], self.memory_of(tensor)
            if memory is not None and (meta.shape != tensor.shape or memory.shape_only.nbytes() > memory.nbytes):
                raise _unsupported(func, "it changes the size of a tensor")
        return self._outputs(func, args, kwargs, inputs, metas, result)

    def _shape_only(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        memory = self.take_in(tensor)
        return tensor_at(ref(tensor, memory), memory.shape_only)

    def _inferred(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        metas: Mapping[int, Tensor],
    ) -> Any:
        """Return the operator's result on the meta device."""
        try:
            if not _READS_VALUES & set(func.tags):
                return func(*_replaced(args, metas), **_replaced(kwargs, metas, device="meta"))
        except NotImplementedError:
            if torch.Tag.nondeterministic_seeded in func.tags or _torch.is_mutable(func):
                raise _unsupported(func, "torch cannot infer the shape of its result") from None
        # The shape depends on values, or the operator has no shape inference.
        real = {id(tensor): self.value(tensor) for tensor in inputs}
        result = func(*_replaced(args, real), **_replaced(kwargs, real))
        return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, result)

    def _outputs(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        metas: Mapping[int, Tensor],
        result: Any,
    ) -> Any:
        """Record the call and return its result: its arguments, views of them, or tensors in new, hollow memory.

        Args:
            metas: by ``id`` of each input, its counterpart on the meta device.
            result: the operator's result on the meta device.
        """
        input_of_meta = {id(metas[id(tensor)]): tensor for tensor in inputs}
        device = _device(func, inputs, kwargs)
        new: list[Memory] = []
        results: list[Ref | None] = []
        outputs: list[Any] = []
        leaves, structure = pytree.tree_flatten(result)
        for leaf in leaves:
            results.append(None)
            if not isinstance(leaf, Tensor) or id(leaf) in input_of_meta:
                outputs.append(input_of_meta.get(id(leaf), leaf))
                continue
            if leaf.layout != torch.strided:
                raise _unsupported(func, f"it returns a tensor of layout {leaf.layout}")
            memory = self._by_shape.get(_torch.storage_key(leaf.untyped_storage()))
            if memory is None:
                shape_only = leaf.untyped_storage()
                memory = self._remember(torch.UntypedStorage(shape_only.nbytes(), device=device), shape_only)
                new.append(memory)
            view = ref(leaf, memory)
            if memory in new:
                results[-1] = view
            with _opened([memory]):
                outputs.append(tensor_at(view, memory.storage))
        if new or _torch.is_mutable(func) or not leaves or all(leaf is None for leaf in leaves):
            self._record(func, args, kwargs, inputs, tuple(results), new, device)
        return pytree.tree_unflatten(outputs, structure)

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        results: tuple[Ref | None, ...],
        new: Sequence[Memory],
        device: torch.device,
    ) -> None:
        refs = {id(tensor): ref(tensor, self.take_in(tensor)) for tensor in inputs if not tensor.is_meta}
        # Only their shape and dtype matter; detach() keeps these as they are now.
        shapes = {id(tensor): tensor.detach() for tensor in inputs if tensor.is_meta}
        written = {id(tensor) for tensor in _torch.written_tensors(func, args, kwargs)}
        writes = {refs[key].memory for key in written}
        reads = {refs[id(tensor)].memory for tensor in inputs if not tensor.is_meta and id(tensor) not in written}
        overwrites: set[int] = set()
        if func.overloadpacket in _OVERWRITES:
            memory = self.take_in(args[0])
            # x.copy_(x) reads the memory that it writes.
            is_only_written = sum(tensor is args[0] for tensor in inputs) == 1 and memory.number not in reads
            if is_only_written and refs[id(args[0])].fills(memory.nbytes) and not memory.outside:
                overwrites = {memory.number}
        generator: int | None = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = self.generators.number(kwargs.get("generator") or default_generator(device))
            self._note_reseed(generator)
        number = self.program.append(
            Operation(
                func,
                _replaced(args, refs | shapes),
                _replaced(kwargs, refs | shapes),
                results,
                frozenset(reads),
                frozenset(writes),
                frozenset(memory.number for memory in new),
                frozenset(overwrites),
                generator,
                torch.get_default_dtype(),
                "   ".join(source.running_line()),
            )
        )
        if generator is not None:
            self.generators.mark_draw(generator, number)

    def _remember(
        self, storage: torch.UntypedStorage, shape_only: torch.UntypedStorage, *, outside: bool = False
    ) -> Memory:
        """Add a memory, hollow unless ``outside``, that is found by either of its storages."""
        memory = self.program.add_memory(storage, shape_only, outside=outside)
        if not outside:
            storage.resize_(0)
        self._by_storage[_torch.storage_key(storage)] = memory
        self._by_shape[_torch.storage_key(shape_only)] = memory
        return memory


class Guard(TorchFunctionMode):
    """Answer methods of tensors that bypass the dispatcher from what ``recorder`` has recorded, or refuse them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and func in _GUARDED and (memory := self._memory(tensor)) is not None:
            if func in _REFUSED and not memory.outside:
                raise CaptureError(
                    f"the construction calls Tensor.{func.__name__} at\n  {'   '.join(source.running_line())}\n"
                    "Tensors have no values until the end of sharded_init(). Call it after the block, or construct the "
                    "model outside of sharded_init()."
                )
            if func is Tensor.data_ptr and not memory.outside:
                # Distinguishes memories as an address does, and is higher than any real address.
                address = (1 << 62) + (memory.number << 41) + tensor.storage_offset() * tensor.element_size()
                return address if tensor.numel() else 0
            if func is Tensor.__repr__:
                shape, dtype = tuple(tensor.shape), tensor.dtype
                return f"Tensor(shape={shape}, dtype={dtype}, without values until the end of sharded_init())"
            if func is Tensor.__deepcopy__:
                return _copied(tensor, *args[1:])
            if func in _READS:
                # Without the recorder's modes too: this call runs now and is not recorded.
                with _torch.plain_tensors(), _torch.no_modes():
                    real = self._recorder.value(tensor)
                    return func(real, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _memory(self, tensor: Tensor) -> Memory | None:
        with _torch.plain_tensors():
            if tensor.is_meta or tensor.layout != torch.strided:
                return None
            return self._recorder.memory_of(tensor)


_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_REFUSED = {Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.__dlpack__, Tensor.storage, Tensor.untyped_storage}
_GUARDED = {*_READS, *_REFUSED, Tensor.data_ptr, Tensor.__repr__, Tensor.__deepcopy__}


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return what ``copy.deepcopy`` returns for a tensor that is not a parameter; torch would copy its storage."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("Only tensors created explicitly by the user support the deepcopy protocol")
        clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        vars(clone).update(copy.deepcopy(vars(tensor), memo))
        memo[id(tensor)] = clone
    deep_copy: Tensor = memo[id(tensor)]
    return deep_copy


def live_tensors(*, collect: bool = True) -> list[Tensor]:
    """Return all plain tensors and parameters that are alive in the process, each once.

    Args:
        collect: run the garbage collector first, so that tensors in unreachable cycles are left out.
    """
    if collect:
        gc.collect()
    return [
        instance
        for instance in gc.get_objects()
        if issubclass(type(instance), Tensor)
        and (type(instance) is Tensor or issubclass(type(instance), nn.Parameter))
        and instance.layout == torch.strided
    ]


@contextlib.contextmanager
def _opened(memories: Sequence[Memory]) -> Iterator[None]:
    """Give hollow storages their final size inside: torch creates no view of a storage that is too small."""
    hollow = [memory for memory in memories if not memory.outside]
    for memory in hollow:
        memory.storage.resize_(memory.nbytes)
    try:
        yield
    finally:
        for memory in hollow:
            memory.storage.resize_(0)


def _on_meta(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def _replaced(values: Any, by_id: Mapping[int, Any], device: str | None = None) -> Any:
    """Return ``values`` with each tensor in ``by_id`` replaced; with ``device`` also a factory's device arguments."""
    replaced = pytree.tree_map(lambda leaf: by_id.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, values)
    if device is not None:
        replaced |= {"device": torch.device(device)} if replaced.get("device") is not None else {}
        replaced |= {name: unset for name, unset in (("pin_memory", False), ("generator", None)) if name in replaced}
    return replaced


def _stays_on_meta(func: OpOverload, args: Any, kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> bool:
    """Return whether the results are on the meta device: such calls run at once and are not recorded.

    Raises:
        CaptureError: a tensor of the meta device is copied to another device.
    """
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        return True
    metas = [tensor for tensor in inputs if tensor.is_meta]
    if not metas:
        return False
    if kwargs.get("device") is None:
        written = _torch.written_tensors(func, args, kwargs)
        if len(metas) == len(inputs) or (written and all(tensor.is_meta for tensor in written)):
            return True
    elif func.overloadpacket is not aten._to_copy:
        # empty_like(x, device="cpu"), which module.to_empty() calls: only the shape of x is used.
        return False
    raise _unsupported(func, "it reads a tensor of the meta device, which has no values")


def _device(func: OpOverload, inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device of the operator's results."""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device
    # 0-d tensors on the CPU may be combined with tensors of any device.
    return next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), torch.device("cpu"))


def _check_plain(func: OpOverload, inputs: Sequence[Tensor]) -> None:
    """Check that the inputs are strided tensors without a dispatch of their own."""
    for tensor in inputs:
        if tensor.layout != torch.strided:
            raise _unsupported(func, f"it has an argument of layout {tensor.layout}")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise _unsupported(func, f"it has an argument of class {type(tensor).__name__}")


def _unsupported(func: OpOverload, why: str) -> CaptureError:
    return CaptureError(
        f"the construction calls {func}, which sharded_init() cannot record: {why}\n"
        f"  {'   '.join(source.running_line())}\n"
        "Construct this part of the model outside of sharded_init(), or make the call after the block."
    )
