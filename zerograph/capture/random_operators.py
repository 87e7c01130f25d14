"""Rewrite random operators during capture: every random number of a step comes from ``zerograph.ops.random``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.base.source import refusal
from zerograph.ir.metadata import origin
from zerograph.ops.random import uniform

aten = torch.ops.aten


@dataclass
class Draws:
    """The random numbers that one trace of ``build()`` has drawn.

    Attributes:
        seed: the graph's input with the seed of the step; None before the trace.
        count: number of operators that have drawn, and the number of the next one.
        draw_seed: gives the seed at the first draw, where none is set: what draws nothing takes no seed.
    """

    seed: Tensor | None = None
    count: int = 0
    draw_seed: Callable[[], Tensor] | None = None

    def uniform(self, size: Sequence[int], device: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw numbers in [0, 1), a tensor of shape ``size``."""
        if self.seed is None:
            assert self.draw_seed is not None
            self.seed = self.draw_seed()
        number, self.count = self.count, self.count + 1
        size, device = list(size), torch.device(device) if device is not None else torch.get_default_device()
        drawn: Tensor = uniform(self.seed, number, size, [0] * len(size), size, dtype, device)
        return drawn

    def normal(self, size: Sequence[int], device: Any, dtype: torch.dtype) -> Tensor:
        """Draw standard normal numbers with the Box-Muller transform."""
        width = torch.float64 if dtype == torch.float64 else torch.float32
        radius = (-2 * torch.log1p(-self.uniform(size, device, width))).sqrt()
        return (radius * (2 * math.pi * self.uniform(size, device, width)).cos()).to(dtype)

    def exponential(self, size: Sequence[int], device: Any, dtype: torch.dtype) -> Tensor:
        """Draw exponential numbers of rate 1, never 0: a Gumbel softmax takes their logarithm."""
        width, smallest = (torch.float64, 2.0**-54) if dtype == torch.float64 else (torch.float32, 2.0**-25)
        return (-torch.log1p(-self.uniform(size, device, width))).clamp(min=smallest).to(dtype)

    def whole_numbers(self, low: int, high: int, size: Sequence[int], device: Any, dtype: torch.dtype) -> Tensor:
        """Draw integers from ``low`` to ``high - 1``, equally likely up to a relative error of (high - low) / 2^53."""
        if high - low > 2**53:
            raise refusal("whole numbers from more than 2^53 values", "Draw from a smaller range.")
        drawn = (self.uniform(size, device, torch.float64) * (high - low)).floor()
        return (drawn.to(torch.int64) + low).to(dtype)

    def replacing_torchs(self) -> AbstractContextManager[Any]:
        """Replace the state of torch's generator by ``count``: ``checkpoint`` restores it before it recomputes."""

        def seeded(seed: Any) -> NoReturn:
            raise refusal(
                "build() seeds torch's generator", "The numbers of a graph follow from config.seed; set that instead."
            )

        def restore(state: int) -> None:
            self.count = state

        return _torch.replaced_generator(lambda: self.count, restore, seeded)


@dataclass
class _RandomOperators:
    """The decompositions of random operators into draws."""

    draws: Draws

    def bernoulli(self, x: Tensor, p: float | Tensor) -> Tensor:
        return (self.draws.uniform(x.shape, x.device) < p).to(x.dtype)

    def native_dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        kept = self.draws.uniform(x.shape, x.device) < 1 - p
        return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept

    def uniform_between(self, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return self.draws.uniform(x.shape, x.device, _floating(x.dtype)) * (high - low) + low

    def normal(self, x: Tensor, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
        return self.draws.normal(x.shape, x.device, _floating(x.dtype)) * std + mean

    def normal_of(self, mean: float | Tensor, std: float | Tensor = 1.0) -> Tensor:
        like = mean if isinstance(mean, Tensor) else std
        assert isinstance(like, Tensor)
        shape = torch.broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Tensor)))
        return self.draws.normal(shape, like.device, _floating(like.dtype)) * std + mean

    def exponential(self, x: Tensor, rate: float = 1.0) -> Tensor:
        return self.draws.exponential(x.shape, x.device, _floating(x.dtype)) / rate

    def geometric(self, x: Tensor, p: float) -> Tensor:
        trials = (self.draws.exponential(x.shape, x.device, torch.float64) / -math.log1p(-p)).ceil() if p < 1 else None
        return torch.ones_like(x) if trials is None else trials.to(x.dtype)

    def cauchy(self, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
        angle = math.pi * (self.draws.uniform(x.shape, x.device, torch.float64) - 0.5)
        return (median + sigma * angle.tan()).to(_floating(x.dtype))

    def random(self, x: Tensor, low: int, high: int | None) -> Tensor:
        if high is None:
            raise refusal("build() draws over the whole range of a dtype (random_)", "Give random_() its bounds.")
        return self.draws.whole_numbers(low, high, x.shape, x.device, x.dtype)

    def rand(self, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return self.draws.uniform(size, device, _floating(dtype))

    def randn(self, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return self.draws.normal(size, device, _floating(dtype))

    def randint(
        self, low: int, high: int, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        return self.draws.whole_numbers(low, high, size, device, dtype or torch.int64)

    def randperm(self, n: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return torch.sort(self.draws.uniform([n], device, torch.float64)).indices.to(dtype or torch.int64)

    def multinomial(self, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
        if count == 1 or not replacement:
            # Take the smallest of exponential numbers, as torch does.
            clocks = self.draws.exponential(weights.shape, weights.device, torch.float64)
            return torch.topk(weights / clocks, count, dim=-1).indices
        sums = weights.double().cumsum(-1)
        drawn = self.draws.uniform([*weights.shape[:-1], count], weights.device, torch.float64) * sums[..., -1:]
        return (sums.unsqueeze(-2) <= drawn.unsqueeze(-1)).sum(-1).clamp(max=weights.shape[-1] - 1)

    def rrelu(
        self, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
    ) -> Tensor:
        if not training:
            return torch.where(x > 0, x, x * ((lower + upper) / 2))
        slope = torch.where(x > 0, 1.0, self.uniform_between(x, lower, upper))
        noise.copy_(slope)
        return x * slope


def table(draws: Draws) -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each random operator into draws, for the overloads that capture meets."""
    operators = _RandomOperators(draws)
    decompositions: dict[Any, Callable[..., Any]] = {
        aten.bernoulli.default: lambda x: operators.bernoulli(x, x),
        aten.bernoulli.p: operators.bernoulli,
        aten.bernoulli.Tensor: operators.bernoulli,
        aten.bernoulli_.float: _written(lambda x, p=0.5: operators.bernoulli(x, p)),
        aten.bernoulli_.Tensor: _written(operators.bernoulli),
        aten.native_dropout.default: operators.native_dropout,
        aten.uniform_.default: _written(operators.uniform_between),
        aten.normal_.default: _written(operators.normal),
        aten.normal_functional.default: operators.normal,
        aten.normal.Tensor_float: operators.normal_of,
        aten.normal.float_Tensor: operators.normal_of,
        aten.normal.Tensor_Tensor: operators.normal_of,
        aten.normal.float_float: lambda mean, std, size, **options: operators.randn(size, **options) * std + mean,
        aten.exponential_.default: _written(operators.exponential),
        aten.geometric_.default: _written(operators.geometric),
        aten.cauchy_.default: _written(operators.cauchy),
        aten.log_normal_.default: _written(lambda x, mean=1.0, std=2.0: operators.normal(x, mean, std).exp()),
        getattr(aten.random_, "from"): _written(operators.random),
        aten.random_.to: _written(lambda x, high: operators.random(x, 0, high)),
        aten.rand.default: operators.rand,
        aten.rand_like.default: _like(operators.rand),
        aten.randn.default: operators.randn,
        aten.randn_like.default: _like(operators.randn),
        aten.randint.default: lambda high, size, **options: operators.randint(0, high, size, **options),
        aten.randint.low: operators.randint,
        aten.randint_like.default: lambda x, high, **options: _like(operators.randint)(x, 0, high, **options),
        aten.randint_like.low_dtype: _like(operators.randint),
        aten.randperm.default: operators.randperm,
        aten.multinomial.default: operators.multinomial,
        aten.rrelu_with_noise.default: operators.rrelu,
        aten.rrelu_with_noise_.default: _written(operators.rrelu),
    }
    for operator, function in list(decompositions.items()):
        packet, overload = operator.overloadpacket, str(operator).rpartition(".")[2]
        if (name := _WITH_GENERATOR.get(overload, "")) in packet.overloads():
            decompositions[getattr(packet, name)] = function
    return {operator: _without_generator(function) for operator, function in decompositions.items()}


def note_comparison(operator: Any, args: Sequence[Any], result: Any) -> None:
    """Note on results of operators which are uniform numbers, and which comparisons of those do not depend on them.

    Models draw a number to skip a layer with a probability (LayerDrop), also if that is 0.
    """
    if operator in (aten.rand.default, aten.rand_like.default):
        result._zerograph_uniform = _torch.version(result)
    elif operator in _OUTSIDE_UNIT and _noted(args[0], "_zerograph_uniform") and isinstance(args[1], int | float):
        below, above = _OUTSIDE_UNIT[operator]
        if below(args[1]) or args[1] >= 1:
            result._zerograph_truth, result._zerograph_compared = above == (args[1] >= 1), _torch.version(result)


def known_truth(operator: Any, args: Sequence[Any]) -> bool | None:
    """Return what an operator reads that needs no value: a comparison that is the same for every drawn number."""
    if operator is aten._local_scalar_dense.default and _noted(args[0], "_zerograph_compared"):
        return bool(args[0]._zerograph_truth)
    return None


def _noted(tensor: Any, name: str) -> bool:
    """Return whether a tensor has the note, and nothing has written to it since."""
    noted = getattr(tensor, name, None)
    return noted is not None and noted == _torch.version(tensor)


# Comparisons of a number in [0, 1): which limits below 1 decide them, and the truth for limits from 1 on.
_OUTSIDE_UNIT: dict[Any, tuple[Callable[[float], bool], bool]] = {
    aten.lt.Scalar: (lambda limit: limit <= 0, True),
    aten.le.Scalar: (lambda limit: limit < 0, True),
    aten.gt.Scalar: (lambda limit: limit < 0, False),
    aten.ge.Scalar: (lambda limit: limit <= 0, False),
}


def _like(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form that draws a tensor like its first argument."""

    def draw(x: Tensor, *limits: int, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return function(*limits, x.shape, dtype=dtype or x.dtype, device=device or x.device)

    return draw


def _written(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the in-place form."""

    def write(x: Tensor, *args: Any) -> Tensor:
        return x.copy_(_laid_out_like(x, function(x, *args)))

    return write


def _laid_out_like(x: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the strides of ``x`` (transposed, channels last), so that it can replace ``x``."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    if x.stride() == value.stride() or order == sorted(order):
        return value
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


_WITH_GENERATOR = {"default": "generator", "low": "low_generator", "low_dtype": "low_generator_dtype"}


def _without_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None or any(isinstance(argument, torch.Generator) for argument in args):
            raise refusal("build() draws from a torch.Generator, whose state is no part of the graph", _NO_GENERATOR)
        return function(*args, **kwargs)

    return call


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    chosen = dtype or torch.get_default_dtype()
    if not chosen.is_floating_point or chosen.itemsize < 2:
        raise refusal(f"build() draws random numbers as {chosen}", "Draw them in a floating point dtype and cast.")
    return chosen


_NO_GENERATOR = "Leave generator= out: the numbers of a graph follow from config.seed. Or draw outside build()."
_HINTS = {
    "attention": "Call F.scaled_dot_product_attention, or set the attention's dropout to 0.",
    "generator": _NO_GENERATOR,
    "rnn": "Set the dropout between the layers to 0, or write the layers one by one.",
}


def refuse_others(graph: fx.Graph) -> None:
    """Refuse operators that draw from torch's own generator, whose numbers differ between ranks.

    Raises:
        CaptureError: there is one; names the operator and the user's line.
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) or _draws_nothing(node):
            continue
        hint = next((text for word, text in _HINTS.items() if word in str(node.target)), None)
        here = origin(node)
        raise refusal(
            f"build() draws random numbers in a way that no graph can repeat ({node.target})",
            hint or "Draw them outside build() and pass them in.",
            (here.source, here.code),
        )


def _draws_nothing(node: fx.Node) -> bool:
    """Return True for attention and recurrent kernels without dropout, which are tagged as random."""
    names = [argument.name for argument in _torch.schema_arguments(node.target)]
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    dropout = arguments.get("dropout_p", arguments.get("dropout"))
    if "dropout_p" in names or "dropout" in names:
        return dropout in (None, 0, 0.0) or arguments.get("train") is False
    return False
