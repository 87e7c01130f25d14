"""Decompose operators during capture whose kernel on a shard does not compute their global meaning.

A mean over a split dimension is not a mean of means, and a batch norm's statistics are those of the whole batch. As
sums and divisions such operators need no rule of their own: the sums become partial, and the divisor is the global
count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import decompositions, pytree, schema_arguments
from zerograph.errors import CaptureError

aten = torch.ops.aten


def table(batch_norm_groups: int = 1) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions for capture: torch's where they exist, ours for what torch does not decompose.

    Args:
        batch_norm_groups: equal parts of the batch, each of which batch norm normalises by itself.
    """
    from_torch = decompositions(_FROM_TORCH)
    return {
        **from_torch,
        **(_batch_norm_by_groups(batch_norm_groups, from_torch) if batch_norm_groups > 1 else {}),
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.var.correction: lambda *args, **options: _var_mean(*args, **options)[0],
        aten.std.correction: lambda *args, **options: _var_mean(*args, **options)[0].sqrt(),
        aten.var_mean.correction: _var_mean,
        aten.nansum.default: _nansum,
        aten.masked_scatter.default: _masked_scatter,
        aten.masked_scatter_backward.default: _masked_scatter_backward,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        **{
            loss: functools.partial(_nll_loss_backward, from_torch[loss])
            for loss in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
        },
        aten.norm.Scalar: _norm,
        aten.norm.ScalarOpt_dim: _norm,
        aten.norm.ScalarOpt_dtype: _norm,
        aten.norm.ScalarOpt_dim_dtype: _norm,
        aten.dist.default: lambda x, y, p=2: _norm(x - y, p),
        **{loss: _by_sample(loss) for loss in _MARGIN_LOSSES},
        **{operator: functools.partial(_of_contiguous, operator) for operator in (*_OF_UNLIKE, *_OF_TRANSPOSED)},
        aten.index.Tensor: lambda x, indices: _of_contiguous(functools.partial(aten.index.Tensor, x), indices),
        aten.rrelu_with_noise_functional.default: _rrelu,
        # The operator only reads the kernel's status and raises.
        aten._linalg_check_errors.default: lambda *_, **__: None,
        aten.empty.memory_format: lambda size, *, dtype=None, device=None, **_: torch.full(
            size, 0, dtype=dtype or torch.get_default_dtype(), device=device
        ),
        aten.empty_like.default: lambda x, **options: _new_full(x, x.shape, 0, **options),
        aten.new_empty.default: lambda x, size, **options: _new_full(x, size, 0, **options),
        aten.ones_like.default: lambda x, **options: _new_full(x, x.shape, 1, **options),
        aten.zeros_like.default: lambda x, **options: _new_full(x, x.shape, 0, **options),
        aten.full_like.default: lambda x, fill, **options: _new_full(x, x.shape, fill, **options),
        aten.new_zeros.default: lambda x, size, **options: _new_full(x, size, 0, **options),
        aten.new_ones.default: lambda x, size, **options: _new_full(x, size, 1, **options),
        # Memory that a copy fills later: as a full tensor it needs no rule of its own.
        aten.new_empty_strided.default: lambda x, size, stride, **options: _new_full(x, size, 0, **options),
        aten.select_backward.default: lambda x, size, *place: aten.select_scatter.default(
            _new_full(x, size, 0), x, *place
        ),
        aten.repeat.default: _repeat,
        aten.constant_pad_nd.default: _pad,
        aten.new_full.default: _new_full,
        **_FOREACH,
    }


def symbolic_table() -> dict[Any, Callable[..., Any]]:
    """Return further decompositions, for captures with symbolic sizes: of operators that torch gives static shapes."""
    return {
        **decompositions(_STATIC_SHAPES),
        aten.unsafe_chunk.default: lambda x, chunks, dim=0: aten.unsafe_split.Tensor(
            x, -(-x.shape[dim] // chunks), dim
        ),
        aten.diagonal_copy.default: lambda x, *dims, **named: x.diagonal(*dims, **named).clone(),
        aten._trilinear.default: _trilinear,
        aten.addcmul.default: lambda x, a, b, *, value=1: x + value * (a * b),
        aten.baddbmm.default: lambda x, a, b, *, beta=1, alpha=1: beta * x + alpha * torch.bmm(a, b),
        aten.lerp.Tensor: lambda x, y, w: torch.where(w.abs() < 0.5, x + w * (y - x), y - (y - x) * (1 - w)),
        aten.addbmm.default: lambda x, a, b, *, beta=1, alpha=1: beta * x + alpha * torch.bmm(a, b).sum(0),
        aten.hardshrink_backward.default: _shrink_backward,
        aten.softshrink_backward.default: _shrink_backward,
    }


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Replace the elements under a mask by those of ``source``, in order. A kernel would count those of a shard."""
    x, mask = torch.broadcast_tensors(x, mask)
    return torch.where(mask, source.reshape(-1)[_rank_under(mask)], x)


def _masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    gradient, mask = torch.broadcast_tensors(gradient, mask)
    kept = torch.where(mask, gradient, 0).reshape(-1)
    return gradient.new_zeros(math.prod(sizes)).index_add(0, _rank_under(mask).reshape(-1), kept).reshape(sizes)


def _rank_under(mask: Tensor) -> Tensor:
    """Return for each element the number of marked ones before it; only the rows' counts are added over all rows."""
    rows = mask.reshape(mask.shape[0], -1) if mask.dim() else mask.reshape(1, 1)
    counts = rows.sum(1)
    before = counts.cumsum(0) - counts
    return torch.where(mask, (before[:, None] + rows.cumsum(1) - 1).reshape(mask.shape), 0)


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *dims: Any) -> Tensor:
    """Multiply three tensors with further dimensions of size one, and sum the product.

    Args:
        a, b, c: the tensors.
        dims: the further dimensions of each of them, the dimensions to sum, and one that kernels unroll.
    """
    a, b, c = (functools.reduce(Tensor.unsqueeze, new, one) for one, new in zip((a, b, c), dims[:3], strict=True))
    return (a * b * c).sum(list(dims[3]))


def _shrink_backward(gradient: Tensor, x: Tensor, limit: float) -> Tensor:
    return torch.where((x >= -limit) & (x <= limit), 0.0, gradient)


def _each(name: str, *, zipped: bool) -> Callable[..., list[Tensor] | None]:
    """Return the decomposition of an operator on lists: the method of this name of each tensor.

    Args:
        name: of the method. One that writes ends with an underscore.
        zipped: each tensor has an operand of its own.
    """

    def decomposed(tensors: Sequence[Tensor], operand: Any, **options: Any) -> list[Tensor] | None:
        operands = operand if zipped else [operand] * len(tensors)
        results = [getattr(one, name)(other, **options) for one, other in zip(tensors, operands, strict=True)]
        return None if name.endswith("_") else results

    return decomposed


# Those with which a loop edits gradients, such as clip_grad_norm_(foreach=True). The edit of one gradient can be
# computed on a bucket's shard, that of a list could not.
_FOREACH = {
    getattr(packet, overload): _each(name, zipped=overload.endswith("List"))
    for kind in ("mul", "div", "add", "sub", "clamp_min", "clamp_max")
    for name in (kind, f"{kind}_")
    for packet in (getattr(aten, f"_foreach_{name}"),)
    for overload in packet.overloads()
    if overload in ("Scalar", "Tensor", "List", "ScalarList")
}

_MARGIN_LOSSES = (
    *(aten.multi_margin_loss.default, aten.multi_margin_loss_backward.default),
    *(aten.multilabel_margin_loss_forward.default, aten.multilabel_margin_loss_backward.default),
)
# Their kernels give other strides than torch says while it traces, so that views would fail: where tensors have unlike
# strides, and where any is transposed.
_OF_UNLIKE = (
    *(aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default),
    *(aten.hardtanh_backward.default, aten.logit_backward.default, aten.softplus_backward.default),
)
_OF_TRANSPOSED = (
    *(aten.log_sigmoid_forward.default, aten._log_softmax_backward_data.default),
    aten.native_layer_norm_backward.default,
)
_STATIC_SHAPES = (aten._unsafe_index, aten.complex, aten.polar)

_FROM_TORCH = (
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten._batch_norm_with_update,
    aten.batch_norm_backward,
    aten.linalg_vector_norm,
    aten.addmv,
    aten.dot,
    aten.vdot,
    aten._weight_norm_interface,
    aten.select_backward,
    aten.slice_backward,
    aten._safe_softmax,
    aten.native_dropout_backward,
    aten.rrelu_with_noise_backward,
)


def _mean(
    x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    total: Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total / count


def _var_mean(
    x: Tensor, dim: Sequence[int] | int | None = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute in two passes: the mean of squares minus the squared mean would cancel in fp32."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = _mean(x, dims, True)
    squares = aten.sum.dim_IntList((x - mean).square(), dims, keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.squeeze(dims)


def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    valid = torch.where(x.isnan(), 0, x)
    total: Tensor = aten.sum.dim_IntList(valid, _dims(x, dim), keepdim, dtype=dtype)
    return total


def _nll_loss_backward(
    fallback: Callable[..., Tensor],
    gradient: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
) -> Tensor:
    """Scatter each sample's gradient to its target.

    The decomposition of torch writes -1 at each target and multiplies all classes by the gradient.
    """
    if weight is not None or x.dim() < 2:
        return fallback(gradient, x, target, weight, reduction, ignored, total)
    index = target.unsqueeze(1)
    valid = index != ignored
    each = gradient / total if reduction == _MEAN else gradient.unsqueeze(1) if gradient.dim() else gradient
    values = -torch.where(valid, each, 0)
    return torch.zeros_like(x).scatter(1, torch.where(valid, index, 0), values)


def _weight_norm_backward(gradient: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and g in w = v g / |v|, whose norms are over all dimensions but ``dim``."""
    dims = [d for d in range(v.dim()) if d != dim]
    along = aten.sum.dim_IntList(gradient * v, dims, True) / norms
    return (gradient - v * (along / norms)) * (g / norms), along


def _norm(
    x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x.to(dtype or x.dtype), 2 if p is None else p, dim, keepdim)
    return length


# Reductions of the losses' kernels, by number: none, mean, sum.
_NONE, _MEAN = 0, 1


def _of_contiguous(operator: Any, *args: Any) -> Any:
    """Run an operator on contiguous tensors, of which a trace and a kernel make results of equal strides."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    if all(one.is_contiguous() for one in tensors):
        return NotImplemented
    if operator in _OF_UNLIKE and all(one.stride() == tensors[0].stride() for one in tensors):
        return NotImplemented
    return operator(*pytree.tree_map_only(Tensor, Tensor.contiguous, args))


def _by_sample(operator: Any) -> Callable[..., Any]:
    """Return the decomposition of a margin loss, or of its backward, into the losses of samples and their reduction."""
    names = [argument.name for argument in schema_arguments(operator)]

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        by_name = {**dict(zip(names, args, strict=False)), **kwargs}
        reduction, samples = by_name.get("reduction", _MEAN), by_name["self"]
        if reduction == _NONE or samples.dim() < 2:
            return NotImplemented
        by_name["reduction"] = _NONE
        if "grad_output" in by_name:
            gradient = by_name["grad_output"] / len(samples) if reduction == _MEAN else by_name["grad_output"]
            return operator(**{**by_name, "grad_output": gradient.expand(len(samples))})
        result = operator(**by_name)
        each, *rest = [result] if isinstance(result, Tensor) else result
        reduced = each.mean() if reduction == _MEAN else each.sum()
        return (reduced, *rest) if rest else reduced

    return decomposed


def _rrelu(x: Tensor, noise: Tensor, lower: float, upper: float, training: bool = False, generator: Any = None) -> Any:
    """Decompose evaluation mode into a leaky relu: the operator is tagged as random."""
    return NotImplemented if training else (torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise)


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def _pad(x: Tensor, pad: Sequence[Any], value: float = 0) -> Any:
    """Pad dimensions of symbolic size by concatenation; torch's kernel takes numbers only."""
    if all(isinstance(size, int) for size in (*x.shape, *pad)):
        return NotImplemented
    for position, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.dim() - 1 - position
        cut = [size if isinstance(size, int) and size < 0 else 0 for size in (before, after)]
        x = x.narrow(dim, -cut[0], x.shape[dim] + sum(cut)) if any(cut) else x
        first, last = (
            [torch.full((*x.shape[:dim], size, *x.shape[dim + 1 :]), value, dtype=x.dtype, device=x.device)]
            if not isinstance(size, int) or size > 0
            else []
            for size in (before, after)
        )
        x = torch.cat([*first, x, *last], dim) if first or last else x
    return x


def _new_full(
    x: Tensor, size: Sequence[int], fill: float, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    # The operator itself, as loops over positions have one for each: torch.full() passes several modes on its way.
    full: Tensor = aten.full.default(size, fill, dtype=dtype or x.dtype, device=device or x.device)
    return full


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Repeat by expanding dimensions of size 1, for which there are rules."""
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    sizes = list(zip(repeats, shape, strict=True))
    paired = x.reshape([part for _, size in sizes for part in (1, size)])
    return paired.expand([part for pair in sizes for part in pair]).reshape([times * size for times, size in sizes])


def _batch_norm_by_groups(groups: int, plain: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return decompositions of batch norm with the statistics of each rank's part of the batch, in global tensors.

    The batch is a sequence of groups of consecutive samples, one for each rank. Statistics have a group dimension,
    which is split as the batch is, so that only the running statistics need communication.

    Args:
        groups: number of groups.
        plain: decompositions for evaluation mode and instance norm.
    """

    def without_groups(x: Tensor, training: bool) -> bool:
        """Return True in evaluation, which has no batch statistics, and for instance norm, whose batch size is 1."""
        return not training or len(x) == 1

    def forward(operator: Any, *args: Any) -> Any:
        x, weight, bias, mean, var, training, momentum, eps = args
        if without_groups(x, training):
            return plain[operator](*args)
        result = _batch_norm_forward(groups, x, weight, bias, mean, var, momentum, eps)
        return result if operator is aten.native_batch_norm.default else (*result, x.new_zeros(0, dtype=torch.uint8))

    def backward(operator: Any, *args: Any) -> Any:
        first, second, weight, _, _, saved, rstd, training, *_ = args
        # The cudnn kernel has a backward for training only, and takes the input first.
        is_cudnn = operator is aten.cudnn_batch_norm_backward.default
        x, gradient = (first, second) if is_cudnn else (second, first)
        if without_groups(x, is_cudnn or training):
            return plain[operator](*args)
        return _batch_norm_backward(groups, gradient, x, weight, saved, rstd)

    both = {
        forward: (aten.native_batch_norm.default, aten.cudnn_batch_norm.default),
        backward: (aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default),
    }
    return {one: functools.partial(run, one) for run, operators in both.items() for one in operators}


def _batch_norm_forward(
    groups: int, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and mean and reciprocal deviation [groups, channels]."""
    parts = _grouped(groups, x)
    dims, count = _reduced_dims(parts), parts.numel() // (groups * parts.shape[2])
    if count == 1:
        # As torch.nn.functional.batch_norm does, which only sees the whole batch.
        raise CaptureError(
            f"batch norm of {len(x)} samples in {groups} parts, with config.batch_norm = 'local': a single value of a "
            "channel has no variance\nGive each rank's micro-batches more than one sample, or set config.batch_norm to "
            "'global'."
        )
    mean = parts.sum(dims, keepdim=True) / count
    var = (parts - mean).square().sum(dims, keepdim=True) / count
    rstd = (var + eps).rsqrt()
    out = ((parts - mean) * rstd).reshape(x.shape)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    unbiased = var * (count / (count - 1))
    for running, statistic in ((running_mean, mean), (running_var, unbiased)):
        if running is not None:
            new = statistic.reshape(groups, -1).sum(0) / groups
            running.copy_(running * (1 - momentum) + new * momentum)
    return out.to(x.dtype), mean.reshape(groups, -1), rstd.reshape(groups, -1)


def _batch_norm_backward(
    groups: int, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    parts, grad = _grouped(groups, x), _grouped(groups, gradient)
    dims, count = _reduced_dims(parts), parts.numel() // (groups * parts.shape[2])
    shape = [groups, 1, -1] + [1] * (x.dim() - 2)
    mean, rstd = mean.reshape(shape), rstd.reshape(shape)
    normed = (parts - mean) * rstd
    total, projected = grad.sum(dims, keepdim=True), (grad * normed).sum(dims, keepdim=True)
    grad_input = (grad - total / count - normed * (projected / count)) * rstd
    if weight is not None:
        grad_input = grad_input * weight.reshape(shape[1:])
    grad_weight, grad_bias = (value.reshape(groups, -1).sum(0) for value in (projected, total))
    return grad_input.reshape(x.shape).to(x.dtype), grad_weight, grad_bias


def _grouped(groups: int, x: Tensor) -> Tensor:
    """Return ``x`` in at least fp32 as [groups, samples, channels, ...]."""
    if groups > 1 and not isinstance(x.shape[0], int):
        raise CaptureError(
            f"config.batch_norm = 'local' needs {groups} parts of one size, which does not change between calls\n"
            "Give each rank as many samples, and each micro-batch, or set config.batch_norm = 'global'."
        )
    if len(x) % groups:
        raise CaptureError(
            f"batch norm of {len(x)} samples, which {groups} parts do not divide, with config.batch_norm = 'local'\n"
            "Each rank normalises its own part, micro-batch by micro-batch: give each as many samples, or set "
            "config.batch_norm = 'global'."
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.reshape([groups, len(x) // groups, *x.shape[1:]])


def _reduced_dims(parts: Tensor) -> list[int]:
    """Return all dimensions except groups and channels."""
    return [1, *range(3, parts.dim())]
