"""Operators that look elements up by index, and their transposes."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import Operands, letters, rule, together, whole

aten = torch.ops.aten

rule(aten.embedding.default, "v! c, ... -> ... c", linear=(0,))


def _embedding_backward(operands: Operands) -> str:
    # Scaled by how often a token occurs in the batch, the parts do not add up to the whole.
    index = "...!" if operands["scale_grad_by_freq"] else "..."
    return f"{index} c, {index} -> v! c"


rule(aten.embedding_dense_backward.default, _embedding_backward, linear=(0,))


def _gathered(operands: Operands) -> str:
    source, index = operands.inputs
    dim = operands["dim"] % source.dim()
    same = [a == b for a, b in zip(source.shape, index.shape, strict=True)]
    return f"{_line('s', dim, same)}, {_line('i', dim, same)} -> {_line('i', dim, same)}"


def _scattered(operands: Operands) -> str:
    source = operands.inputs[0]
    dim = operands["dim"] % source.dim()
    others = operands.inputs[1:]
    same = [all(a == v.shape[i] for v in others) for i, a in enumerate(source.shape)]
    rest = ", ".join(_line("i", dim, same) for _ in others)
    return f"{_line('s', dim, same)}, {rest} -> {_line('s', dim, same)}"


def _line(prefix: str, dim: int, same: list[bool]) -> str:
    """Dimensions that all operands walk together are factors; the indexed one, and cut ones, stay whole."""
    return " ".join(f"d{i}" if i != dim and equal else f"{prefix}{i}!" for i, equal in enumerate(same))


rule(aten.gather.default, _gathered, linear=(0,))
rule(aten.scatter.value, _scattered)
rule(aten.scatter.src, _scattered, linear=together(0, 2))
rule(aten.scatter_add.default, _scattered, linear=together(0, 2))


def _index_selected(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank
    source = " ".join("v!" if i == dim else f"d{i}" for i in range(rank))
    result = " ".join("picked" if i == dim else f"d{i}" for i in range(rank))
    return f"{source}, picked -> {result}"


rule(aten.index_select.default, _index_selected, linear=(0,))


def _index_added(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank
    # What is added to zeros may be added in parts.
    picked = "picked" if operands.zero[0] else "picked!"
    whole, source = (" ".join(name if i == dim else f"d{i}" for i in range(rank)) for name in ("v!", picked))
    return f"{whole}, {picked}, {source} -> {whole}"


rule(aten.index_add.default, _index_added, linear=together(0, 2))


def _looked_up(operands: Operands) -> str:
    if _by_mask(operands):
        return whole(operands)
    source, indices, result = _advanced(operands)
    return f"{source}, {', '.join(indices)} -> {result}"


def _put(operands: Operands) -> str:
    if _by_mask(operands):
        return _put_where(operands)
    source, indices, result = _advanced(operands)
    values = operands.inputs[-1].dim()
    names = result.split()[-values:] if values else []
    if not (operands["accumulate"] and operands.zero[0]):
        # Of a split index each rank would keep the old value where the others put the new one.
        indices = [_unsplittable(index) for index in indices]
        names = [_unsplittable(name) if name.startswith("i") else name for name in names]
    return f"{source}, {', '.join(indices)}, {' '.join(names)} -> {source}"


def _advanced(operands: Operands) -> tuple[str, list[str], str]:
    """``x[i, :, j]``: what ``x``, each index and the result walk; dimensions that are looked up in stay whole."""
    names = letters(operands.inputs[0].dim())
    asked = [at for at, index in enumerate(operands["indices"]) if index is not None]
    indices = operands.inputs[1 : 1 + len(asked)]
    rank = max(index.dim() for index in indices)
    walked = [f"i{at}" for at in range(rank)]
    rest = [name for at, name in enumerate(names) if at not in asked]
    # Indices of dimensions side by side leave theirs in that place, others in front.
    start = asked[0] if asked == list(range(asked[0], asked[-1] + 1)) else 0
    source = " ".join(f"v{at}!" if at in asked else name for at, name in enumerate(names))
    return source, [" ".join(walked[rank - i.dim() :]) for i in indices], " ".join(rest[:start] + walked + rest[start:])


def _by_mask(operands: Operands) -> bool:
    return any(value.dtype is torch.bool for value in operands.inputs[1:] if value is not operands.inputs[-1])


def _put_where(operands: Operands) -> str:
    """One value wherever a mask says so; of several, where one goes depends on the whole mask."""
    source, *masks, values = operands.inputs
    if len(masks) > 1 or values.numel() > 1:
        return whole(operands)
    start = next(at for at, index in enumerate(operands["indices"]) if index is not None)
    names = letters(source.dim())
    mask, value = names[start : start + masks[0].dim()], ["1"] * values.dim()
    return f"{' '.join(names)}, {' '.join(mask)}, {' '.join(value)} -> {' '.join(names)}"


def _unsplittable(names: str) -> str:
    return " ".join(f"{name}!" for name in names.split())


rule(aten.index.Tensor, _looked_up, linear=(0,))
rule(aten._unsafe_index.Tensor, _looked_up, linear=(0,))
rule(aten.index_put.default, _put, linear=together(0, 2))
rule(aten._unsafe_index_put.default, _put, linear=together(0, 2))
