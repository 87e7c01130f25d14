"""Recording the construction of a model: every operator becomes an entry of a program, and none is run.

The tensors that construction gets are of the device, shape and class that it expects; their storages are *hollow*, of
0 bytes, so that they can be filled in place when all is known, and everybody who holds a tensor has the right one. (Of
tensors on the meta device neither the device nor the identity would be right, of fake tensors not the class.) What
reads a storage past the dispatcher is caught by ``Guard``: tensors from which nothing may be read yet.
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

# Writes all elements of its first argument, whatever they were.
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
    """Records what is computed inside into ``program``; ``generators`` are those that are drawn from."""

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
        """The memory that the tensor lies in, if a recorded operator has had to do with that."""
        return self._by_storage.get(_torch.storage_key(tensor.untyped_storage()))

    def take_in(self, tensor: Tensor) -> Memory:
        """The same; what is not known yet has been made outside, and its bytes are there."""
        if (known := self.memory_of(tensor)) is not None:
            return known
        storage = tensor.untyped_storage()
        return self._remember(storage, _on_meta(storage.nbytes()), outside=True)

    def value(self, tensor: Tensor) -> Tensor:
        """What the tensor holds now."""
        memory = self.memory_of(tensor)
        if memory is None:
            return tensor
        return values_now(self.program, ref(tensor, memory), self._draws)

    def note_reseeds(self) -> None:
        """Record what the user has done to the generators since the last draw."""
        for number in range(len(self.generators.watched)):
            self._note_reseed(number)

    def _note_reseed(self, number: int) -> None:
        if (found := self.generators.changed(number)) is not None:
            self.program.append(found)

    def _dispatched(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        _check_plain(func, given)
        if func.namespace in _COLLECTIVES:
            raise _unsupported(func, "it sends values to other ranks")
        memories = [self.take_in(one) for one in given if not one.is_meta]
        if func.overloadpacket in _SETS or torch.Tag.inplace_view in func.tags:
            # They change what the tensor object says of its memory, and nothing in that.
            if func.overloadpacket is aten.resize_:
                raise _unsupported(func, "it changes the size of a tensor")
            with _opened(memories):
                return func(*args, **kwargs)
        if _stays_on_meta(func, args, kwargs, given):
            metas = {id(one): self._shape_only(one) for one in given}
            on_meta = "meta" if kwargs.get("device") is not None else None
            return func(*_replaced(args, metas), **_replaced(kwargs, metas, device=on_meta))
        if torch.Tag.data_dependent_output in func.tags:
            real = {id(one): self.value(one) for one in given}
            return func(*_replaced(args, real), **_replaced(kwargs, real))
        metas = {id(one): self._shape_only(one) for one in given}
        made = self._inferred(func, args, kwargs, given, metas)
        for one in given:
            meta, memory = metas[id(one)], self.memory_of(one)
            if memory is not None and (meta.shape != one.shape or memory.shape_only.nbytes() > memory.nbytes):
                raise _unsupported(func, "it changes the size of a tensor")
        return self._answer(func, args, kwargs, given, metas, made)

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
        given: Sequence[Tensor],
        metas: Mapping[int, Tensor],
    ) -> Any:
        """The operator's results on the meta device."""
        try:
            if not _READS_VALUES & set(func.tags):
                return func(*_replaced(args, metas), **_replaced(kwargs, metas, device="meta"))
        except NotImplementedError:
            if torch.Tag.nondeterministic_seeded in func.tags or _torch.is_mutable(func):
                raise _unsupported(func, "torch does not know the shape of its result beforehand") from None
        # The shape depends on values, or only the operator itself knows it.
        real = {id(one): self.value(one) for one in given}
        found = func(*_replaced(args, real), **_replaced(kwargs, real))
        return pytree.tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, found)

    def _answer(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        metas: Mapping[int, Tensor],
        made: Any,
    ) -> Any:
        """Record the call, and what it returns: its arguments, views of them, or tensors in new, hollow memory."""
        same = {id(metas[id(one)]): one for one in given}
        device = _device(func, given, kwargs)
        new: list[Memory] = []
        results: list[Ref | None] = []
        answers: list[Any] = []
        leaves, structure = pytree.tree_flatten(made)
        for leaf in leaves:
            results.append(None)
            if not isinstance(leaf, Tensor) or id(leaf) in same:
                answers.append(same.get(id(leaf), leaf))
                continue
            if leaf.layout != torch.strided:
                raise _unsupported(func, f"it makes a tensor of layout {leaf.layout}")
            memory = self._by_shape.get(_torch.storage_key(leaf.untyped_storage()))
            if memory is None:
                shape_only = leaf.untyped_storage()
                memory = self._remember(torch.UntypedStorage(shape_only.nbytes(), device=device), shape_only)
                new.append(memory)
            at = ref(leaf, memory)
            if memory in new:
                results[-1] = at
            with _opened([memory]):
                answers.append(tensor_at(at, memory.storage))
        if new or _torch.is_mutable(func) or not leaves or all(leaf is None for leaf in leaves):
            self._record(func, args, kwargs, given, tuple(results), new, device)
        return pytree.tree_unflatten(answers, structure)

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        results: tuple[Ref | None, ...],
        new: Sequence[Memory],
        device: torch.device,
    ) -> None:
        refs = {id(one): ref(one, self.take_in(one)) for one in given if not one.is_meta}
        # Asked for their shape and dtype, as of now.
        shapes = {id(one): one.detach() for one in given if one.is_meta}
        written = {id(one): one for one in _torch.written_tensors(func, args, kwargs)}
        writes = {refs[one].memory for one in written}
        reads = {refs[id(one)].memory for one in given if not one.is_meta and id(one) not in written}
        overwrites: set[int] = set()
        if func.overloadpacket in _OVERWRITES:
            memory = self.take_in(args[0])
            # x.copy_(x) reads what it writes.
            once = sum(one is args[0] for one in given) == 1 and memory.number not in reads
            if once and refs[id(args[0])].fills(memory.nbytes) and not memory.outside:
                overwrites = {memory.number}
        generator: int | None = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = kwargs.get("generator") or default_generator(device)
            generator = self.generators.number(drawn_from)
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
            self.generators.drew(generator, number)

    def _remember(
        self, storage: torch.UntypedStorage, shape_only: torch.UntypedStorage, *, outside: bool = False
    ) -> Memory:
        memory = self.program.add_memory(storage, shape_only, outside=outside)
        if not outside:
            storage.resize_(0)
        self._by_storage[_torch.storage_key(storage)] = memory
        self._by_shape[_torch.storage_key(shape_only)] = memory
        return memory


class Guard(TorchFunctionMode):
    """Gives those who look at values past the dispatcher what ``recorder`` knows of them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and func in _LOOKS and (memory := self._memory(tensor)) is not None:
            if func in _REFUSED and not memory.outside:
                raise CaptureError(
                    f"construction asks for Tensor.{func.__name__} at\n  {'   '.join(source.running_line())}\n"
                    "Inside sharded_init() tensors have no bytes before the end. Do it after that, or make the model "
                    "plainly."
                )
            if func is Tensor.data_ptr and not memory.outside:
                # Tells memories apart, as an address does; higher than any real one, which others have.
                at = (1 << 62) + (memory.number << 41) + tensor.storage_offset() * tensor.element_size()
                return at if tensor.numel() else 0
            if func is Tensor.__repr__:
                return f"Tensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, made at the end of sharded_init())"
            if func is Tensor.__deepcopy__:
                return _copied(tensor, *args[1:])
            if func in _READS:
                # Neither the recorder: what is done here is done now.
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
_LOOKS = {*_READS, *_REFUSED, Tensor.data_ptr, Tensor.__repr__, Tensor.__deepcopy__}


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """What ``copy.deepcopy`` makes of a tensor that is no parameter; torch would copy the storage behind it."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("Only tensors created explicitly by the user support the deepcopy protocol")
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        vars(made).update(copy.deepcopy(vars(tensor), memo))
        memo[id(tensor)] = made
    found: Tensor = memo[id(tensor)]
    return found


def live_tensors(*, collect: bool = True) -> list[Tensor]:
    """All plain tensors and parameters that somebody holds, wherever; every one once.

    Args:
        collect: those that only garbage holds are not among them.
    """
    if collect:
        gc.collect()
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), Tensor)
        and (type(one) is Tensor or issubclass(type(one), nn.Parameter))
        and one.layout == torch.strided
    ]


@contextlib.contextmanager
def _opened(memories: Sequence[Memory]) -> Iterator[None]:
    """Hollow storages as large as they are to be, untouched: torch makes no tensor in one that is too small."""
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
    """``values`` with others in place of tensors; with ``device`` also what a factory would need to make them there."""
    found = pytree.tree_map(lambda one: by_id.get(id(one), one) if isinstance(one, Tensor) else one, values)
    if device is not None:
        found |= {"device": torch.device(device)} if found.get("device") is not None else {}
        found |= {name: none for name, none in (("pin_memory", False), ("generator", None)) if name in found}
    return found


def _stays_on_meta(func: OpOverload, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> bool:
    """Whether the results lie on the meta device, on which nothing has to be put off.

    Raises:
        CaptureError: a tensor without values is to be copied to where values are.
    """
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        return True
    metas = [one for one in given if one.is_meta]
    if not metas:
        return False
    if kwargs.get("device") is None:
        written = _torch.written_tensors(func, args, kwargs)
        if len(metas) == len(given) or (written and all(one.is_meta for one in written)):
            return True
    elif func.overloadpacket is not aten._to_copy:
        # empty_like(x, device="cpu"), as module.to_empty() has it: x says a shape and no more.
        return False
    raise _unsupported(func, "it reads a tensor of the meta device, which has no values")


def _device(func: OpOverload, given: Sequence[Tensor], kwargs: Mapping[str, Any]) -> torch.device:
    """Where the operator's results will lie."""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device
    # 0-d tensors of the CPU go along with those of any device.
    return next((one.device for one in given if one.device.type != "cpu"), torch.device("cpu"))


def _check_plain(func: OpOverload, given: Sequence[Tensor]) -> None:
    for one in given:
        if one.layout != torch.strided:
            raise _unsupported(func, f"it is given a tensor of layout {one.layout}")
        if type(one).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise _unsupported(func, f"it is given a tensor of class {type(one).__name__}")


def _unsupported(func: OpOverload, why: str) -> CaptureError:
    return CaptureError(
        f"construction calls {func}, which cannot be put off: {why}\n  {'   '.join(source.running_line())}\n"
        "Make this part of the model outside of sharded_init(), or do this after it."
    )
