"""Load models of transformers that are sharded from the start: ``from_pretrained()``.

transformers constructs the model, renames, converts and casts its weights, ties them, and initializes what the files do
not have. It opens the files through :class:`_LazyFile`, so the weights that it handles are file tensors, which have no
values. After it has returned, each rank reads its parts.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerograph.errors import CheckpointError, ConfigError
from zerograph.ir.annotate import own_tensors
from zerograph.runtime.checkpoint.file_tensor import FileTensor, OpenFile
from zerograph.runtime.job.exchange import broadcast_from
from zerograph.runtime.job.process_group import Job, agreeing
from zerograph.runtime.state import create_provisional_store, provisional_layout, split_part
from zerograph.state.sharded_init import is_constructing, join_for

_QUANTIZED = (
    "a quantized model is loaded whole, by its own from_pretrained(); layers of 8 bits are then sharded after "
    "zerograph.integrations.bitsandbytes.use_plain_linears(model)"
)
# Arguments of transformers that place or convert weights in ways that shards do not have.
_REFUSED: Mapping[str, str] = {
    "device_map": "give device= instead",
    "quantization_config": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "gguf_file": _QUANTIZED,
    "state_dict": "construct the model in zg.sharded_init() and load the state with step.load_state_dict()",
    "tp_plan": "zerograph places the parameters",
    "tp_size": "zerograph places the parameters",
    "device_mesh": "give placement= instead",
    "distributed_config": "give placement= instead",
    "offload_folder": "give config.memory.offload of the graph instead",
}


def from_pretrained(
    cls: Any,
    folder_or_id: str | os.PathLike[str],
    *args: Any,
    placement: DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """Load a model of transformers with parameters that are sharded from the start. Every rank must call it.

    The values are bitwise those of ``cls.from_pretrained(folder_or_id, *args, **kwargs)``. Each rank reads from the
    safetensors files only the rows of its parts, so each byte is read once per job (once per group of ranks that
    ``placement`` splits over). Where transformers transposes or interleaves weights as it loads them, each rank reads
    all of that weight. Memory: this rank's parts, and one block of rows. Buffers, and parameters that the files do not
    have, are whole until the end; parameters that transformers initializes have rank 0's random values.

    The parameters are then like those of :func:`zerograph.sharded_init`: computing with them is an error, optimizers
    can be built on them, and a graph takes them over when it compiles.

    Args:
        cls: a model class of transformers, or an auto class.
        folder_or_id: a folder with safetensors files, or an id that huggingface_hub resolves through its cache.
        args, kwargs: further arguments of ``cls.from_pretrained``, such as ``dtype=`` and ``revision=``.
        placement: a mesh of all ranks, as for :func:`zerograph.sharded_init`.
        device: the device of the parameters and buffers.

    Returns:
        What ``cls.from_pretrained`` returns.

    Raises:
        ConfigError: an argument that shards cannot follow, or a quantized model.
        CheckpointError: a file is damaged.
        OSError: on the rank that sees it, as from transformers: no such folder or id, or no safetensors files.
        PlacementError: ``placement`` is not a placement, or leaves ranks out.
        RankMismatchError: ranks load different models, or another rank has failed.
    """
    if is_constructing() or torch.compiler.is_compiling():
        raise ConfigError("from_pretrained() inside sharded_init() or build(): call it outside; it shards the model")
    job = join_for("from_pretrained()", placement)
    doing = f"loading {folder_or_id}"
    with agreeing(job, doing) as facts:
        _check_arguments(cls, folder_or_id, kwargs)
        result, opened = _load_lazily(cls, folder_or_id, args, kwargs)
        facts |= _facts(_model(result), opened)
    _shard(job, _model(result), torch.device(device), doing)
    return result


def _check_arguments(cls: Any, folder_or_id: Any, kwargs: Mapping[str, Any]) -> None:
    if not callable(getattr(cls, "from_pretrained", None)):
        raise ConfigError(f"from_pretrained() takes a model class of transformers, not {cls!r:.60}")
    for name, advice in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"from_pretrained() does not take {name}=: {advice}")
    if not isinstance(folder_or_id, (str, os.PathLike)):
        raise ConfigError(f"from_pretrained() takes a folder or an id of a model, not {folder_or_id!r:.60}")
    if kwargs.get("use_safetensors") is False:
        raise ConfigError("from_pretrained() reads safetensors files only: leave use_safetensors=False out")


def _model(result: Any) -> Any:
    """Return the model; with ``output_loading_info=True`` transformers returns a tuple."""
    return result[0] if isinstance(result, tuple) else result


class _LazyFile(OpenFile):
    """A file as transformers opens it with ``safetensors.safe_open``: slices are tensors that are not read yet."""

    def __init__(self, filename: str, framework: str = "pt", **options: Any) -> None:
        super().__init__(filename)

    keys = OpenFile.names

    def __enter__(self) -> _LazyFile:
        return self

    def __exit__(self, *error: object) -> None:
        """Keep the file open: its tensors are read later."""

    def metadata(self) -> Any:
        return self._file.metadata()

    def get_slice(self, name: str) -> _LazySlice:
        return _LazySlice(self._file.get_slice(name), lambda: self.get_tensor(name))


class _LazySlice:
    def __init__(self, entry: Any, tensor: Callable[[], FileTensor]) -> None:
        self.get_dtype, self.get_shape, self._tensor = entry.get_dtype, entry.get_shape, tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor() if index is ... else self._tensor()[index]


def _load_lazily(
    cls: Any, source: str | os.PathLike[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[_LazyFile]]:
    """Run ``cls.from_pretrained`` with files that are not read yet.

    transformers has no argument for that: the function with which it opens files is replaced meanwhile.

    Returns:
        Its result, and the files that it has opened.
    """
    try:
        modeling_utils = importlib.import_module("transformers.modeling_utils")
    except ImportError as error:
        raise ConfigError("from_pretrained() needs transformers: pip install transformers") from error
    opened: list[_LazyFile] = []

    def open_lazily(filename: str, *rest: Any, **options: Any) -> _LazyFile:
        opened.append(_LazyFile(filename))
        return opened[-1]

    try:
        with mock.patch.object(modeling_utils, "safe_open", open_lazily):
            result = cls.from_pretrained(source, *args, **{**kwargs, "use_safetensors": True})
    except OSError as error:
        if "safetensors" in str(error):
            error.add_note("zg.from_pretrained() reads safetensors files only, which model.save_pretrained() writes.")
        raise
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{source}: its index of safetensors files is damaged: {error}") from error
    model = _model(result)
    if not isinstance(model, modeling_utils.PreTrainedModel):
        raise ConfigError(f"from_pretrained() loads models of transformers; {cls!r:.60} made a {type(model).__name__}")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(f"{os.fspath(source)}: {_QUANTIZED}")
    if not any(isinstance(tensor, FileTensor) for tensor in model.state_dict(keep_vars=True).values()):
        raise ConfigError(
            f"transformers {importlib.import_module('transformers').__version__} took no weights of "
            f"{os.fspath(source)} from safetensors files through its safe_open()"
        )
    return result, opened


def _facts(model: nn.Module, opened: list[_LazyFile]) -> dict[str, str]:
    """Return what must be equal on all ranks: the files, and the names, shapes and dtypes of the tensors."""
    facts = {f"the size of {file.path.name}": str(file.path.stat().st_size) for file in opened}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        origin = "from the files" if isinstance(tensor, FileTensor) else "initialized"
        facts[name] = f"{tensor.dtype} {tuple(tensor.shape)}, {origin}"
    return facts


def _shard(job: Job, model: nn.Module, device: torch.device, doing: str) -> None:
    """Replace the parameters by sharded ones and the buffers by whole ones. A collective."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    initialized = [tensor.detach() for tensor in tensors.values() if not isinstance(tensor, FileTensor)]
    broadcast_from(job, initialized)
    new: dict[int, Tensor] = {}
    parts = []
    with agreeing(job, doing):
        for key, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter) or not tensor.numel():
                new[key] = _on_device(tensor, device)
                continue
            empty = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            layout = provisional_layout(job, parameter.shape, parameter.dtype, device)
            parts.append((layout, parameter, split_part(job, layout, tensor.detach())))
            new[key] = parameter
            # Frees values that are in memory already.
            tensor.data = empty
    for module in list(model.modules()):
        for name, tensor in own_tensors(module):
            setattr(module, name, new[id(tensor)])
    for layout, parameter, part in parts:
        create_provisional_store(job, layout, parameter, part)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    values = tensor.detach()
    whole = (values.whole() if isinstance(values, FileTensor) else values).to(device)
    return nn.Parameter(whole, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
