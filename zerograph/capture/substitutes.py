"""Replace functions of torch during capture that cannot be traced, or not sample by sample.

They read values, or compute shapes from values, although the same numbers can be computed without. The loss scaling of
torch is refused, because the graph has its own.

Of elements that a mask selects, ``x.masked_select(mask).sum()``, the number depends on values, which no graph can do.
The sum and the mean do not need it. The CTC loss takes such elements as targets, whose lengths it is told.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.base import source
from zerograph.base.contexts import replaced
from zerograph.base.source import refusal, warn_user
from zerograph.capture import wrappers
from zerograph.capture.experts import captured_experts
from zerograph.capture.flex_attention import captured_flex_attention
from zerograph.errors import CaptureError
from zerograph.ir.alias import is_view, is_view_or_copy
from zerograph.ops.ctc_loss import ctc_loss


@contextlib.contextmanager
def substituted(counts_any: bool = True) -> Iterator[None]:
    """Make torch.nn use the replacements.

    Args:
        counts_any: ``bincount`` has ``minlength`` bins. In a loop it may get more, as in plain PyTorch.
    """
    with (
        replaced(_called_once()),
        replaced(_replacements(counts_any)),
        _torch.trusted_causal_flags(),
        _torch.unchecked_distributions(),
        _torch.unchecked_values(),
        replaced(wrappers.seen_through()),
        _torch.compiled_functions_run_plainly(),
        captured_flex_attention(),
        replaced(captured_experts()),
        replaced(untraced_masks()),
    ):
        yield


def _is_torchs(value: Any) -> bool:
    # Not torchvision's, for instance, which a script may put there too.
    return str(value.__globals__.get("__name__")).partition(".")[0] == "torch"


# torch's functions of Python, as they were at first.
_TORCHS = {
    (owner, name): value
    for owner in (F, torch, Tensor)
    for name, value in vars(owner).items()
    if isinstance(value, types.FunctionType) and _is_torchs(value)
}


def _called_once() -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions that a script has put in place of torch's: owner, name, and one that modes do not see.

    torch's own function, which such a function calls, finds itself by its name to tell a mode of it, so each mode of a
    trace would call the script's once more. A mode that is told of it all the same runs the attribute ``torchs``.
    """
    for owner in (F, torch, Tensor):
        for name, value in [*vars(owner).items()]:
            if isinstance(value, types.FunctionType) and not _is_torchs(value):
                in_c = vars(torch._C.TensorBase).get(name) if owner is Tensor else None
                unseen = _unseen(value)
                unseen.torchs = _unseen(_TORCHS.get((owner, name), in_c) or value)
                yield owner, name, unseen


def _unseen(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _torch.plain_tensors():
            return function(*args, **kwargs)

    return run


def _replacements(counts_any: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner and name of each function of torch that is replaced, and the replacement."""
    yield F, "gaussian_nll_loss", _gaussian_nll_loss
    yield F, "ctc_loss", _ctc_loss
    # A sparse gradient has the same numbers in another layout.
    yield F, "embedding", _with_arguments(F.embedding, lambda arguments: arguments.pop("sparse", None))
    yield F, "embedding_bag", _bags(F.embedding_bag)
    batch_norm = nn.modules.batchnorm._BatchNorm
    yield batch_norm, "forward", _averaging(batch_norm.forward)
    for owner in (torch, Tensor):
        yield owner, "masked_select", _selecting(owner.masked_select)
        if counts_any:
            yield owner, "bincount", _counting(owner.bincount)
    yield nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_log_softmax
    # The operators of F.interpolate(), which take scales as a list.
    for name in [name for name in vars(_torch.nn_kernels) if "upsample" in name]:
        yield _torch.nn_kernels, name, _resampling(name)
    for layer in (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield layer, "forward", _in_python(layer.forward)
    # On an accelerator it packs weights, by their addresses.
    yield nn.RNNBase, "flatten_parameters", lambda self: None
    for name, cell in (("lstm_cell", _lstm_cell), ("gru_cell", _gru_cell)):
        yield _torch.recurrent_functions, name, _unfused(getattr(_torch.recurrent_functions, name), cell)
    for name in ("scale", "unscale_", "step", "update"):
        yield torch.amp.GradScaler, name, _unless_enabled(getattr(torch.amp.GradScaler, name))


def _resampling(name: str) -> Any:
    """Return a kernel of ``torch.nn`` that computes the size of its result in Python if sizes are symbolic."""
    function, operator = getattr(_torch.nn_kernels, name), getattr(torch.ops.aten, name).default

    def run(input: Tensor, output_size: Any, *rest: Any) -> Any:
        if not _torch.has_symbols(input):
            return function(input, output_size, *rest)
        *flags, scales = rest
        sizes = input.shape[2:]
        if output_size is None:
            output_size = [torch.sym_int(size * scale) for size, scale in zip(sizes, scales, strict=True)]
        return operator(input, output_size, *flags, *([None] * len(sizes) if scales is None else scales))

    return run


def _in_python(forward: Any) -> Any:
    """Return the ``forward`` of a recurrent layer that keeps symbolic sizes, and on accelerators plain operators.

    There its kernels pack all weights into one storage, or compute a whole cell. No rule knows them.
    """

    @functools.wraps(forward)
    def run(self: nn.Module, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not _torch.has_symbols(input) and not _is_on_accelerator(input):
            return forward(self, input, *args, **kwargs)
        with _torch.python_decompositions():
            return forward(self, input, *args, **kwargs)

    return run


def _unfused(plain: Any, cell: Any) -> Any:
    """Return a recurrent cell that on accelerators is computed by plain operators."""
    return lambda input, *args: (cell if _is_on_accelerator(input) else plain)(input, *args)


def _is_on_accelerator(input: Any) -> bool:
    return isinstance(input, Tensor) and input.device.type != "cpu"


def _lstm_cell(x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    hidden, cell = state
    gates = (F.linear(x, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)).chunk(4, 1)
    kept = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
    return gates[3].sigmoid() * kept.tanh(), kept


def _gru_cell(x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    (reset, update, new), (hidden_reset, hidden_update, hidden_new) = (
        gates.chunk(3, 1) for gates in (F.linear(x, w_ih, b_ih), F.linear(hidden, w_hh, b_hh))
    )
    candidate = (new + (reset + hidden_reset).sigmoid() * hidden_new).tanh()
    return candidate + (update + hidden_update).sigmoid() * (hidden - candidate)


def _unless_enabled(method: Any) -> Any:
    """Return a method of torch's scaler that raises if scaling is enabled."""

    def refusing(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return method(self, *args, **kwargs)
        raise source.refusal(
            "build() scales its loss by a torch.amp.GradScaler",
            "Leave it out, call loss.backward(), and set config.precision.grad_scaler = zg.GradScaler(): the graph "
            "scales the loss, skips steps that overflow, and changes the scale.",
        )

    return refusing


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Compute the loss as torch does, but clamp negative variances instead of refusing them, which would read them."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    # The clamp has no gradient.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute the loss with an operator of fixed shapes, which returns one number per sample."""
    if isinstance(targets, Selected):
        # Concatenated targets, by a mask of padded ones.
        targets = targets.rows_packed()
    lengths = [torch.as_tensor(length, device=log_probs.device).long() for length in (input_lengths, target_lengths)]
    if log_probs.dim() == 2:
        first, second = (length.reshape(1) for length in lengths)
        return _ctc_loss(log_probs[:, None], targets[None], first, second, blank, reduction, zero_infinity).squeeze()
    loss = ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss.isinf(), 0, loss)
    return _reduced(loss / lengths[1].clamp(min=1) if reduction == "mean" else loss, reduction)


def _selecting(plain: Callable[..., Tensor]) -> Any:
    """Return ``masked_select`` whose result has no shape, if the mask has that of the tensor."""

    @functools.wraps(plain)
    def select(input: Tensor, mask: Tensor, **options: Any) -> Tensor:
        if options or not is_mask_of(input, mask):
            return plain(input, mask, **options)
        return selected(input, mask)

    return select


def _averaging(plain: Callable[..., Tensor]) -> Any:
    """Return the forward of batch norm that averages over all batches (``momentum=None``) without reading the count."""

    @functools.wraps(plain)
    def forward(self: Any, input: Tensor) -> Tensor:
        count = self.num_batches_tracked
        if self.momentum is not None or not self.training or not self.track_running_stats or count is None:
            return plain(self, input)
        self._check_input_dim(input)
        count.add_(1)
        # With a momentum of 1 the running statistics are those of this batch.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        normed = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for running, batch in ((self.running_mean, mean), (self.running_var, var)):
            share = 1.0 / count.to(running.dtype)
            running.copy_(running * (1 - share) + batch * share)
        return normed

    return forward


def _counting(plain: Callable[..., Tensor]) -> Any:
    """Return a ``bincount`` with exactly ``minlength`` bins, if not 0; larger values are errors when the step runs."""

    @functools.wraps(plain)
    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength or input.dim() != 1:
            return plain(input, weights, minlength)
        if weights is None:
            counts = torch.ones_like(input, dtype=torch.int64)
        else:
            counts = weights if weights.dtype == torch.float32 else weights.double()
        return counts.new_zeros(minlength).index_add(0, input.long(), counts)

    return bincount


def _bags(plain: Callable[..., Tensor]) -> Any:
    """Return an ``embedding_bag`` that looks up bags of one size by sample; torch's kernel needs batch offsets."""

    def embedding_bag(
        input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        names = ["norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights"]
        names += ["include_last_offset", "padding_idx"]
        # A sparse gradient has the same numbers in another layout.
        options = {**dict(zip(names, args, strict=False)), **kwargs, "sparse": False}
        mode, padding = options.get("mode", "mean"), options.get("padding_idx")
        if input.dim() != 2 or max_norm is not None or (mode == "max" and padding is not None):
            return plain(input, weight, offsets, max_norm, **options)
        rows = F.embedding(input, weight, padding, scale_grad_by_freq=options.get("scale_grad_by_freq", False))
        if mode == "max":
            return rows.amax(1)
        counts = torch.ones_like(input, dtype=weight.dtype) if padding is None else (input != padding).to(weight.dtype)
        scale = options.get("per_sample_weights")
        total = (rows * (counts if scale is None else counts * scale).unsqueeze(-1)).sum(1)
        return total if mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1)

    return embedding_bag


def _adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """Compute every cluster for every sample, and select; torch selects the samples of a cluster first."""
    x, target = (input_, target_) if target_.dim() else (input_[None], target_[None])
    log_probs = self.log_prob(x).gather(1, target[:, None]).squeeze(1)
    output = log_probs if target_.dim() else log_probs.squeeze(0)
    return _torch.adaptive_output(output, (-log_probs).mean())


class Selected(Tensor):
    """The elements of a tensor that a mask selects; it has no data and no shape.

    Attributes:
        source: the tensor.
        mask: of the same shape.
    """

    source: Tensor
    mask: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selection = args[0] if args else None
        if isinstance(selection, Selected) and not args[1:] and not kwargs:
            zeros = torch.zeros((), dtype=selection.source.dtype, device=selection.source.device)
            if func in (Tensor.neg, Tensor.__neg__, torch.neg, Tensor.float, Tensor.detach):
                return selected(func(selection.source), selection.mask)
            if func in (Tensor.sum, torch.sum):
                return torch.where(selection.mask, selection.source, zeros).sum()
            if func in (Tensor.mean, torch.mean):
                return torch.where(selection.mask, selection.source, zeros).sum() / selection.mask.sum()
        raise _refused()

    def rows_packed(self) -> Tensor:
        """Return a tensor of the source's shape in which each row begins with its selected elements, in order."""
        order = self.mask.logical_not().long().argsort(stable=True, dim=-1)
        return self.source.gather(-1, order)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refused()


def _refused() -> CaptureError:
    return refusal(
        "the number of elements that a mask selects depends on values",
        "Only sum(), mean() and the CTC loss of them can be computed: multiply by the mask, or use torch.where.",
    )


def is_mask_of(tensor: Any, index: Any) -> bool:
    """Return whether ``index`` is a mask of all elements of ``tensor``."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and tuple(index.shape) == tuple(tensor.shape)


def selected(tensor: Tensor, mask: Tensor) -> Selected:
    """Return the elements of ``tensor`` where ``mask`` is true."""
    new: Selected = _torch.tensor_without_data(Selected, (0,), tensor.dtype, tensor.device, requires_grad=False)
    new.source, new.mask = tensor, mask
    return new


aten = torch.ops.aten


def untraced_masks() -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions by which transformers builds the masks that it builds outside of traces: owner, name, it.

    Traced, it builds every attention mask as a tensor of the length squared. Outside of traces it passes
    ``is_causal=True`` where a mask would mask nothing else. To know that it reads values of masks and positions. A
    capture answers from the nodes that made these tensors, and builds a mask where they do not tell.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    older: Any = sys.modules.get("transformers.modeling_attn_mask_utils")
    replaced: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (masks, "is_tracing", lambda plain: lambda tensor=None: tensor is not None),
        (masks, "find_packed_sequence_indices", _unless_consecutive),
        (masks, "_ignore_causal_mask_sdpa", lambda plain: _with_arguments(plain, _drop_full_mask)),
        (masks, "_ignore_bidirectional_mask_sdpa", lambda plain: _with_arguments(plain, _drop_full_mask)),
        (masks, "_preprocess_mask_arguments", lambda plain: _with_arguments(plain, _warn_of_cache)),
        (
            getattr(older, "AttentionMaskConverter", None),
            "_ignore_causal_mask_sdpa",
            # Asked as in training, where a trace makes no difference without a padding mask.
            lambda plain: staticmethod(_with_arguments(plain, lambda arguments: arguments.update(is_training=True))),
        ),
    ]
    # These modules read no value where they ask.
    questions = ("is_torchdynamo_compiling", "is_tracing")
    replaced += [(sys.modules.get(name), ask, lambda plain: lambda *_: False) for name in _PLAIN for ask in questions]
    for owner, name, replacement in replaced:
        if hasattr(owner, name):
            yield owner, name, replacement(getattr(owner, name))


_PLAIN = (
    "transformers.integrations.sdpa_attention",
    "transformers.utils.output_capturing",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("falcon_mamba", "jamba", "mamba", "zamba")),
)


def _unless_consecutive(plain: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Return the search for documents in packed rows, which finds none where positions follow one another."""

    @functools.wraps(plain)
    def find(position_ids: Tensor) -> Tensor | None:
        return None if _is_consecutive(_torch.node_of(position_ids)) else plain(position_ids)

    return find


def _with_arguments(plain: Callable[..., Any], change: Callable[[dict[str, Any]], object]) -> Callable[..., Any]:
    """Return the function with a change of its arguments, by name."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments)
        return plain(*bound.args, **bound.kwargs)

    return call


def _drop_full_mask(arguments: dict[str, Any]) -> None:
    """Ask whether a mask is needed with None for a padding mask that is known to mask nothing."""
    mask, keys = arguments["padding_mask"], arguments["kv_length"]
    if mask is not None and arguments.get("q_length", keys) == keys and _is_full(_torch.node_of(mask)):
        arguments["padding_mask"] = None


def _is_consecutive(node: fx.Node | None) -> bool:
    """Return whether each number of a row is known to be one more than the number before it."""
    while node is not None and node.meta["val"].dtype in _WHOLE and not _is_written(node):
        if node.target in _RANGES:
            return node.target is not aten.arange.start_step or bool((*node.args, 1)[2] == 1)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _keeps_steps(node, source):
            return False
        node = source
    return False


def _keeps_steps(node: fx.Node, source: fx.Node) -> bool:
    """Return whether rows of a node are rows of its first argument, or parts of them, plus a number."""
    if node.target in (aten.view.default, aten.unsqueeze.default):
        return bool(source.meta["val"].dim() == 1)
    if node.target is aten.expand.default:
        size = source.meta["val"].shape[-1] if source.meta["val"].dim() > 1 else 1
        return not isinstance(size, int) or size != 1
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return not isinstance(node.args[1], fx.Node) or not isinstance(node.args[1].meta["val"], Tensor)
    return node.target in (aten._to_copy.default, aten.clone.default)


_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_WHOLE = (torch.int32, torch.int64)


def _is_full(node: fx.Node | None) -> bool:
    """Return whether all elements of a mask are known to be true."""
    while node is not None and not _is_written(node):
        if node.target is aten.ones.default or (node.target is aten.full.default and node.args[1] == 1):
            return True
        if not is_view_or_copy(node):
            return False
        node = node.all_input_nodes[0]
    return False


def _is_written(node: fx.Node) -> bool:
    """Return whether an operator writes to the value of a node, or to a view of it."""
    return any(
        node in _torch.written_arguments(user) or (is_view(user) and user.args[0] is node and _is_written(user))
        for user in node.users
    )


def _warn_of_cache(arguments: dict[str, Any]) -> None:
    """Warn where a cache hides documents in packed rows from transformers' preparation of masks."""
    positions = arguments.get("position_ids")
    if (
        isinstance(positions, Tensor)
        and arguments.get("attention_mask") is None
        and arguments.get("past_key_values") is not None
        # Without an argument a model makes them itself, of one dimension, and they never restart.
        and (positions if positions._base is None else positions._base).dim() > 1
    ):
        warn_user(
            "transformers ignores position_ids that restart within a row while the model has a cache of keys and "
            "values: documents packed into a row would attend to each other\n"
            "Call the model with use_cache=False, or set model.config.use_cache = False."
        )
