"""``module.to(nn.graph.GraphModule)``: settings of a module in a graph."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerograph.base.contexts import replaced
from zerograph.errors import ConfigError

# A plain attribute of the module: graphs notice its changes, and compile again.
_CHECKPOINTED = "zerograph_activation_checkpointing"


class GraphModule:
    """The settings of a module in graphs.

    Attributes:
        activation_checkpointing: save only the module's inputs, and recompute its activations in backward, in all
            graphs of ``zerograph.compat.oneflow`` that contain the module.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def activation_checkpointing(self) -> bool:
        """Return whether the module's activations are recomputed in backward."""
        return _CHECKPOINTED in vars(self._module)

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise ConfigError(f"activation_checkpointing = {mode!r}: give True or False")
        if mode:
            setattr(self._module, _CHECKPOINTED, True)
        else:
            vars(self._module).pop(_CHECKPOINTED, None)

    def set_stage(self, stage_id: int | None = None, placement: Any = None) -> None:
        """Raise an error: pipeline parallelism is not supported.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "set_stage() is for pipeline parallelism, which zerograph does not have\n"
            "Leave it out: ZeRO stage 3 shards models that do not fit on one rank."
        )

    @property
    def stage_id(self) -> None:
        """None: there is no pipeline."""
        return None

    @stage_id.setter
    def stage_id(self, value: Any) -> None:
        self.set_stage(value)

    def __repr__(self) -> str:
        return f"GraphModule({type(self._module).__name__}, activation_checkpointing={self.activation_checkpointing})"


class GraphTensor:
    """A parameter or buffer from ``graph._state()``; ``to(flow.Tensor)`` returns the tensor itself."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def to(self, kind: type) -> Any:
        """Return the tensor for ``flow.Tensor``, and ``self`` for ``GraphTensor``.

        Raises:
            ConfigError: ``kind`` is another class.
        """
        if kind is Tensor:
            return self._tensor
        if kind is GraphTensor:
            return self
        raise ConfigError(f"to({kind!r:.60}) of a graph's tensor: give flow.Tensor, for the tensor itself")

    def __repr__(self) -> str:
        return f"GraphTensor({type(self._tensor).__name__}, shape={tuple(self._tensor.shape)})"


def checkpoints(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run checkpointed modules under ``torch.utils.checkpoint``, which capture supports."""
    return replaced(
        (module, "forward", functools.partial(checkpoint, module.forward, use_reentrant=False))
        for module in root.modules()
        if _CHECKPOINTED in vars(module)
    )
