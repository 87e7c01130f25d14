"""Pooling, resampling, padding and sampling of images. Samples, and mostly channels, are independent."""

from __future__ import annotations

from typing import Any

import torch

from zerograph.passes.rules.registry import leading, rule

aten = torch.ops.aten


def _each(operators: tuple[Any, ...], trailing: int, *, linear: bool, batch: int | None = -1) -> None:
    """Add a rule to operators that mix elements along the last ``trailing`` dimensions of their first operand only.

    Args:
        batch: see :class:`Rule`; -1: a batch and a channel dimension come first.
    """
    for operator in operators:
        rule(
            operator,
            leading(lambda operands: operands.inputs[0].dim() - trailing),
            linear=(0,) if linear else (),
            batch=trailing + 2 if batch == -1 else batch,
        )


# By the number of dimensions that they pool or pad.
_MAXIMA = ("adaptive_max_pool{}d", "max_pool{}d_with_indices", "max_unpool{}d")
_PADS = ("reflection_pad{}d", "reflection_pad{}d_backward", "replication_pad{}d", "replication_pad{}d_backward")
_SUMS = (
    *("adaptive_max_pool{}d_backward", "max_pool{}d_with_indices_backward", "avg_pool{}d", "avg_pool{}d_backward"),
    *("_adaptive_avg_pool{}d", "_adaptive_avg_pool{}d_backward"),
)
for _names, _dims, _linear in ((_MAXIMA, (2, 3), False), (_PADS, (1, 2, 3), True), (_SUMS, (2, 3), True)):
    for _dim in _dims:
        _each(tuple(getattr(aten, name.format(_dim)).default for name in _names), _dim, linear=_linear)

# A batch and a channel dimension, then the resampled ones.
RESAMPLING = (
    (aten.upsample_nearest1d.default, aten.upsample_nearest1d_backward.default),
    (aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact1d_backward.default),
    (aten.upsample_linear1d.default, aten.upsample_linear1d_backward.default),
    (aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default),
    (aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default),
    (aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
    (aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default),
    (aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default),
    (aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default),
    (aten.upsample_nearest3d.default, aten.upsample_nearest3d_backward.default),
    (aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d_backward.default),
    (aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default),
)
for _number, _pair in enumerate(RESAMPLING):
    # Three of one dimension, six of two, three of three.
    _batch = 3 if _number < 3 else 4 if _number < 9 else 5
    for _operator in _pair:
        rule(_operator, leading(lambda operands: 2), linear=(0,), batch=_batch)

_each((aten.pixel_shuffle.default,), 3, linear=True, batch=None)
# Torch 2.13 returns an empty tensor of the wrong shape.
_each((aten.pixel_unshuffle.default,), 3, linear=True, batch=0)
rule(aten.channel_shuffle.default, "n c! ... -> n c! ...", linear=(0,))


# Windows as columns: the batch dimension, if there is one, can be split.
_each((aten.im2col.default,), 3, linear=True, batch=None)
_each((aten.col2im.default,), 2, linear=True, batch=None)

# Points of the grid are independent; the gradient of the image is the sum over them.
rule(aten.grid_sampler_2d.default, "n c h! w!, n i j xy! -> n c i j", linear=(0,))
rule(aten.grid_sampler_3d.default, "n c d! h! w!, n i j k xyz! -> n c i j k", linear=(0,))
rule(
    aten.grid_sampler_2d_backward.default,
    "n c i j, n c h! w!, n i j xy! -> n c h! w!, n i j xy!",
    linear=(0,),
)
rule(
    aten.grid_sampler_3d_backward.default,
    "n c i j k, n c d! h! w!, n i j k xyz! -> n c d! h! w!, n i j k xyz!",
    linear=(0,),
)
rule(aten.affine_grid_generator.default, leading(lambda operands: 1), linear=(0,))
