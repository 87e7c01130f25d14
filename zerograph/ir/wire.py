"""Wire formats: how the boxings of parameters and gradients code what they send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from zerograph.base.options import is_one_of, is_whole_number
from zerograph.errors import ConfigError
from zerograph.ops.blocks import Code, Codec

Kind = Literal["gather", "reduce"]

KINDS: tuple[Kind, ...] = ("gather", "reduce")
_CODES = ("bf16", "int8", "int4")
_BLOCK = 256
_MIN_BLOCK = 16
# Two bytes are enough beside integers of four bits; fp16 would lose the scales of small gradients.
_SCALES = {"int8": torch.float32, "int4": torch.bfloat16}


@dataclass(frozen=True)
class WireFormat:
    """A wire format; see :func:`wire`.

    Attributes:
        codec: how tensors are coded.
        feedback: each code makes up for what earlier codes of the same tensor have lacked.
    """

    codec: Codec
    feedback: bool = False

    def __str__(self) -> str:
        return f"{self.codec}, with feedback" if self.feedback else str(self.codec)


def wire(
    code: str, *, block: int | None = None, scales: torch.dtype | None = None, feedback: bool = False
) -> WireFormat:
    """Return a wire format for ``config.precision.wire``.

    Args:
        code: ``"bf16"``, or ``"int8"`` or ``"int4"``: integers with one scale for each block, by which the largest
            magnitude of the block is 127 or 7.
        block: elements of a block, a power of two from 16 up. Default 256. Blocks begin anew in each parameter.
        scales: ``torch.float32`` (default for int8) or ``torch.bfloat16`` (default for int4).
        feedback: each code makes up for what earlier ones have lacked. For ``"reduce"`` each rank keeps the error of
            its codes, in bf16, and adds it to its next gradient before that is coded. For ``"gather"``, at stages 1
            and 2, ranks keep the weights that they received, and code the difference. Default False.

    Raises:
        ConfigError: there is no such format.
    """
    if not is_one_of(code, *_CODES):
        raise ConfigError(f"zg.wire({code!r:.60}): choose one of {', '.join(map(repr, _CODES))}")
    if not isinstance(feedback, bool):
        raise ConfigError(f"zg.wire(feedback={feedback!r:.60}): give True or False")
    if code == "bf16":
        if block is not None or scales is not None:
            raise ConfigError("zg.wire('bf16') has no blocks and no scales: leave block= and scales= out")
        return WireFormat(Codec("bf16"), feedback)
    if block is not None and (not is_whole_number(block, _MIN_BLOCK) or block & (block - 1)):
        raise ConfigError(f"zg.wire(block={block!r:.60}): give a power of two, {_MIN_BLOCK} or more")
    if scales not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(f"zg.wire(scales={scales!r:.60}): choose torch.float32 or torch.bfloat16")
    return WireFormat(Codec(cast(Code, code), block or _BLOCK, scales or _SCALES[code]), feedback)


def wire_complaint(value: Any) -> str:
    """Return what is wrong with a value of ``config.precision.wire``; empty for a valid one."""
    if not isinstance(value, Mapping):
        return "" if _is_format(value) else _ADVICE
    for kind, formats in value.items():
        if kind not in KINDS:
            return f"the kind {kind!r:.60}: choose 'gather' or 'reduce'"
        dims = formats.items() if isinstance(formats, Mapping) else [(0, formats)]
        for dim, one in dims:
            if not is_whole_number(dim, 0):
                return f"{kind}: the mesh dimension {dim!r:.60}: give a whole number, 0 or more"
            if not _is_format(one):
                return f"{kind}: {one!r:.60}: {_ADVICE}"
    return ""


_ADVICE = (
    "choose 'exact', 'bf16', 'int8', 'int4' or a zg.wire(...), or give a dict of them by 'gather' and 'reduce', "
    "and there by mesh dimension"
)


def _is_format(value: Any) -> bool:
    return isinstance(value, WireFormat) or is_one_of(value, "exact", *_CODES)


def format_of(option: Any, kind: Kind, dim: int) -> WireFormat | None:
    """Return the format of a kind of boxing along a mesh dimension; None for exact values.

    Args:
        option: the value of ``config.precision.wire``.
        kind: ``"gather"`` or ``"reduce"``.
        dim: the mesh dimension.
    """
    if isinstance(option, Mapping):
        option = option.get(kind, "exact")
    if isinstance(option, Mapping):
        option = option.get(dim, "exact")
    if isinstance(option, WireFormat):
        return option
    return None if option == "exact" else wire(option)


def block_of(option: Any) -> int:
    """Return the number of elements at whose multiples parameters begin in buckets, for a value of the option.

    With bf16 it is not 1 either: buckets are then cut in equal pieces for all ranks of the mesh.
    """
    return max((max(one.codec.block, _MIN_BLOCK) for one in _formats(option)), default=1)


def _formats(option: Any) -> Iterator[WireFormat]:
    if isinstance(option, Mapping):
        for value in option.values():
            yield from _formats(value)
    elif (one := format_of(option, "gather", 0)) is not None:
        yield one
