"""Tensors, storages and tensor subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch

# A reference to a tensor's memory that does not keep it; equal to others of the same memory.
WeakStorage = StorageWeakRef

# ``Module._apply`` calls this for each parameter; it compares types only.
COMPATIBLE_TYPES = torch._has_compatible_shallow_copy_type


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Treat tensors of a subclass as plain tensors, so that the subclass itself can read their metadata."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def plain_tensors() -> contextlib.AbstractContextManager[None]:
    """Hide calls from subclasses and from torch function modes."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is equal for storages of the same memory; unique while a reference to the storage exists."""
    return int(storage._cdata)


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are in one storage."""
    share: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    return share(first, second)


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep it allocated.

    The function is private; torch's own CUDA graphs make tensors of their pools by it (``cudagraph_trees``).
    """
    storage = tensor.untyped_storage()
    make: Callable[..., Any] = torch._C._construct_storage_from_data_pointer
    memory = make(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes to the tensor."""
    return int(tensor._version)


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """Run operators on the metadata of a subclass alone, past its ``__torch_dispatch__``."""
    context: contextlib.AbstractContextManager[None] = no_dispatch()
    return context


# As ``__torch_function__`` of a subclass: its functions cost nothing more, and return what they return.
no_torch_function = torch._C._disabled_torch_function_impl


def tensor_without_data(
    cls: type[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    requires_grad: bool,
    stride: Sequence[int] | None = None,
) -> Any:
    """Return a tensor of the subclass ``cls`` that has a shape, a dtype and a device, but no data.

    Its writes are counted, in inference mode too.
    """
    make: Callable[..., Any] = Tensor._make_wrapper_subclass
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        return make(cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad)
