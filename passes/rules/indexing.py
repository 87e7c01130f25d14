"""Operators that look elements up by index, and their transposes."""

from __future__ import annotations

import torch

from zerograph.ops.rows import shift_offsets
from zerograph.passes.rules.registry import Operands, added, dim_names, rule, together, whole, with_dim

aten = torch.ops.aten

# Rows of all parts in their order.
rule(shift_offsets, whole)
rule(aten.embedding.default, "v! c, ... -> ... c", linear=(0,))


def _embedding_backward(operands: Operands) -> str:
    # If gradients are scaled by the frequency of a token in the batch, parts do not add up to the whole.
    index = "...!" if operands["scale_grad_by_freq"] else "..."
    return f"{index} c, {index} -> v! c"


rule(aten.embedding_dense_backward.default, _embedding_backward, linear=(0,))


def _gathered(operands: Operands) -> str:
    source, index = operands.inputs
    dim = operands["dim"] % source.dim()
    same = [a == b for a, b in zip(source.shape, index.shape, strict=True)]
    return f"{_factors('s', dim, same)}, {_factors('i', dim, same)} -> {_factors('i', dim, same)}"


def _scattered(operands: Operands) -> str:
    source = operands.inputs[0]
    dim = operands["dim"] % source.dim()
    others = operands.inputs[1:]
    same = [all(a == v.shape[i] for v in others) for i, a in enumerate(source.shape)]
    other_factors = ", ".join(_factors("i", dim, same) for _ in others)
    return f"{_factors('s', dim, same)}, {other_factors} -> {_factors('s', dim, same)}"


def _factors(prefix: str, dim: int, same: list[bool]) -> str:
    """Return the factors of an operand: dimensions of equal sizes are shared, the indexed one and others stay whole."""
    return " ".join(f"d{i}" if i != dim and equal else f"{prefix}{i}!" for i, equal in enumerate(same))


rule(aten.gather.default, _gathered, linear=(0,))
rule(aten.scatter.value, _scattered)
rule(aten.scatter.src, _scattered, linear=together(0, 2))
rule(aten.scatter_add.default, lambda operands: _scatter_added(operands), linear=together(0, 2))
rule(aten.scatter_reduce.two, _scattered)


def _scatter_added(operands: Operands) -> str:
    """Return a notation in which the indexed dimension of the added values can be split: parts add up to the whole."""
    source, index, values = operands.inputs
    dim = operands["dim"] % source.dim() if source.dim() else 0
    same = [size == index.shape[i] == values.shape[i] for i, size in enumerate(source.shape)]
    source_factors, index_factors = _factors("s", dim, same), _factors("i", dim, same)
    if index.shape == values.shape:
        index_factors = index_factors.replace(f"i{dim}!", f"i{dim}")
    return f"{added(operands, source_factors)}, {index_factors}, {index_factors} -> {source_factors}"


def _index_selected(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank
    return f"{with_dim(rank, dim, 'v!')}, picked -> {with_dim(rank, dim, 'picked')}"


rule(aten.index_select.default, _index_selected, linear=(0,))


def _index_added(operands: Operands) -> str:
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank if rank else 0
    source, values = with_dim(rank, dim, "v!"), with_dim(operands.inputs[2].dim(), dim, "picked")
    index = "picked" if operands.inputs[1].dim() else ""
    return f"{added(operands, source)}, {index}, {values} -> {source}"


def _index_written(operands: Operands) -> str:
    """Return a notation in which written rows stay together: of two rows with one index only one counts."""
    rank = operands.inputs[0].dim()
    dim = operands["dim"] % rank if rank else 0
    source, values = with_dim(rank, dim, "v!"), with_dim(operands.inputs[-1].dim(), dim, "picked!")
    index = "picked!" if operands.inputs[1].dim() else ""
    return ", ".join([source, index, values][: len(operands.inputs)]) + f" -> {source}"


rule(aten.index_add.default, _index_added, linear=together(0, 2))
rule(aten.index_copy.default, _index_written, linear=together(0, 2))
rule(aten.index_fill.int_Scalar, _index_written, linear=lambda operands: () if operands["value"] else (0,))
rule(aten.index_fill.int_Tensor, _index_written, linear=together(0, 2))


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
    if operands["accumulate"]:
        return f"{added(operands, source)}, {', '.join(indices)}, {' '.join(names)} -> {source}"
    # With a split index each rank would keep the old value where another rank writes the new one.
    indices = [_unsplittable(index) for index in indices]
    names = [_unsplittable(name) if name.startswith("i") else name for name in names]
    return f"{source}, {', '.join(indices)}, {' '.join(names)} -> {source}"


def _advanced(operands: Operands) -> tuple[str, list[str], str]:
    """Return the factors of ``x``, of each index and of the result of ``x[i, :, j]``; indexed dimensions stay whole."""
    names = dim_names(operands.inputs[0].dim())
    indexed = [dim for dim, index in enumerate(operands["indices"]) if index is not None]
    indices = operands.inputs[1 : 1 + len(indexed)]
    rank = max(index.dim() for index in indices)
    index_names = [f"i{dim}" for dim in range(rank)]
    others = [name for dim, name in enumerate(names) if dim not in indexed]
    # The dimensions of adjacent indices replace them in place; otherwise they come first.
    start = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    source = " ".join(f"v{dim}!" if dim in indexed else name for dim, name in enumerate(names))
    return (
        source,
        [" ".join(index_names[rank - i.dim() :]) for i in indices],
        " ".join(others[:start] + index_names + others[start:]),
    )


def _by_mask(operands: Operands) -> bool:
    return any(value.dtype is torch.bool for value in operands.inputs[1:] if value is not operands.inputs[-1])


def _put_where(operands: Operands) -> str:
    """Return the notation of writing under a mask. Several values depend on the whole mask, one value does not."""
    source, *masks, values = operands.inputs
    if len(masks) > 1 or values.numel() > 1:
        return whole(operands)
    start = next(dim for dim, index in enumerate(operands["indices"]) if index is not None)
    names = dim_names(source.dim())
    mask, value = names[start : start + masks[0].dim()], ["1"] * values.dim()
    return f"{' '.join(names)}, {' '.join(mask)}, {' '.join(value)} -> {' '.join(names)}"


def _unsplittable(names: str) -> str:
    return " ".join(f"{name}!" for name in names.split())


rule(aten.index.Tensor, _looked_up, linear=(0,))
rule(aten._unsafe_index.Tensor, _looked_up, linear=(0,))
rule(aten.index_put.default, _put, linear=together(0, 2))
rule(aten._unsafe_index_put.default, _put, linear=together(0, 2))
