"""Signatures of an operator without a rule, found by running it whole and in pieces on random data.

They hold for what was tried: shapes, dtypes and arguments of one node, random numbers, small integers. An operator that
behaves differently for rare values (a threshold far out) can mislead the search; a registered rule cannot be misled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, is_mutable, pytree
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Signature, Split, broadcast, partial_sum
from zerograph.passes.rules.registry import all_broadcast

# Maximum elements of the inputs and outputs of one run. A larger search would take longer than the step.
MOST_ELEMENTS = 2**22
_MOST_CANDIDATES = 256
_DRAWS = 2


def discover(
    node: fx.Node,
    ranks: int,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    known: dict[str, tuple[Signature, ...] | None],
) -> tuple[Signature, ...] | None:
    """Return the signatures of a node's operator over ``ranks`` ranks; None if the operator cannot be tried.

    The search is deterministic: every rank finds the same signatures.

    Args:
        node: the node.
        ranks: number of ranks along the mesh dimension.
        inputs, outputs: tensors of the shapes and dtypes to try.
        known: what was found, by operator, arguments and ranks. A model repeats its layers.
    """
    key = _described(node, inputs, ranks)
    if key not in known:
        trial = trial_of(node, ranks, inputs, outputs)
        found = None if trial is None else filter(trial.holds, trial.candidates())
        known[key] = None if found is None else (all_broadcast(node), *found)
    return known[key]


class Trial:
    """An operator with several draws of inputs, and its outputs for each.

    Attributes:
        draws: inputs and outputs of each draw.
    """

    def __init__(self, node: fx.Node, ranks: int, draws: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
        self.draws = draws
        self._node, self._ranks = node, ranks

    def candidates(self) -> Iterator[Signature]:
        """Yield signatures that may hold. The SBPs of outputs are read off the first draw."""
        inputs, _ = self.draws[0]
        choices = sorted(self._splits(inputs), key=lambda sbps: sum(isinstance(sbp, Split) for sbp in sbps))
        for sbps in [*choices[:_MOST_CANDIDATES], *self._sums(inputs)]:
            outputs = self._outputs(sbps)
            if outputs is not None:
                yield Signature(sbps, outputs)

    def holds(self, signature: Signature) -> bool:
        """Return whether the operator computes in pieces what it computes whole, on every draw."""
        return all(
            (parts := self._in_pieces(inputs, signature.inputs)) is not None
            and all(
                _matches(sbp, [part[index] for part in parts], whole)
                for index, (sbp, whole) in enumerate(zip(signature.outputs, wholes, strict=True))
            )
            for inputs, wholes in self.draws
        )

    def _splits(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Sbp, ...]]:
        """Yield input SBPs with one split index: in each input one dimension of its size, or none."""
        sizes = {size for tensor in inputs for size in tensor.shape if size > 1 and size % self._ranks == 0}
        for size in sorted(sizes):
            choices: list[list[Sbp]] = [
                [broadcast, *(Split(dim) for dim, length in enumerate(tensor.shape) if length == size)]
                for tensor in inputs
            ]
            for sbps in itertools.islice(itertools.product(*choices), 4 * _MOST_CANDIDATES):
                if any(isinstance(sbp, Split) for sbp in sbps):
                    yield sbps

    def _sums(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Sbp, ...]]:
        """Yield input SBPs in which one input, or all floating-point inputs, are partial sums."""
        floating = [index for index, tensor in enumerate(inputs) if tensor.is_floating_point() or tensor.is_complex()]
        groups = [(index,) for index in floating] + ([tuple(floating)] if len(floating) > 1 else [])
        for group in groups:
            yield tuple(partial_sum if index in group else broadcast for index in range(len(inputs)))

    def _outputs(self, sbps: tuple[Sbp, ...]) -> tuple[Sbp, ...] | None:
        inputs, wholes = self.draws[0]
        parts = self._in_pieces(inputs, sbps)
        if parts is None:
            return None
        output_sbps: list[Sbp] = []
        for index, whole in enumerate(wholes):
            pieces = [part[index] for part in parts]
            # Partial inputs must give partial outputs; else the first SBP that fits the pieces.
            options: list[Sbp] = [*(Split(dim) for dim in range(whole.dim())), broadcast, partial_sum]
            if any(isinstance(sbp, PartialSum) for sbp in sbps):
                options = [partial_sum]
            sbp = next((option for option in options if _matches(option, pieces, whole)), None)
            if sbp is None:
                return None
            output_sbps.append(sbp)
        # Whole outputs of split inputs mean that the operator did not read their values; it may for other values.
        return None if all(isinstance(sbp, Broadcast) for sbp in output_sbps) else tuple(output_sbps)

    def _in_pieces(self, inputs: Sequence[Tensor], sbps: Sequence[Sbp]) -> list[list[Tensor]] | None:
        """Return the outputs that each rank would compute; None if the operator raises an error."""
        generator = torch.Generator().manual_seed(2)
        parts = [_parts(tensor, sbp, self._ranks, generator) for tensor, sbp in zip(inputs, sbps, strict=True)]
        results = [_run(self._node, [part[rank] for part in parts]) for rank in range(self._ranks)]
        return None if any(result is None for result in results) else [r for r in results if r is not None]


def trial_of(node: fx.Node, ranks: int, values: Sequence[Tensor], expected: Sequence[Tensor]) -> Trial | None:
    """Return the operator with random inputs of these shapes and dtypes, or None if it cannot be tried.

    Args:
        expected: outputs, for their shapes.
    """
    target = node.target
    if not isinstance(target, OpOverload) or is_mutable(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if not values or sum(tensor.numel() for tensor in (*values, *expected)) > MOST_ELEMENTS:
        return None
    draws = []
    for number in range(_DRAWS):
        for highest in (2, 1):
            # Integers may be indices: if 0 and 1 are out of range, zeros may be valid.
            generator = torch.Generator().manual_seed(number)
            inputs = [_random_like(value, generator, highest, 0.5 * number) for value in values]
            outputs = _run(node, inputs)
            if outputs is not None:
                break
        if outputs is None or [output.shape for output in outputs] != [output.shape for output in expected]:
            return None
        repeated = _run(node, inputs)
        if repeated is None or not all(map(_close, repeated, outputs)) or not all(map(_is_comparable, outputs)):
            return None
        draws.append((inputs, outputs))
    return Trial(node, ranks, draws)


def _is_comparable(output: Tensor) -> bool:
    """Return whether the output can be compared: zeros and NaNs look alike however they were computed."""
    if not output.is_floating_point() and not output.is_complex():
        return True
    return bool(output.numel() and output.any() and output.isfinite().double().mean() > 0.5)


def _random_like(value: Tensor, generator: torch.Generator, highest: int, shift: float) -> Tensor:
    shape, dtype = tuple(int(size) for size in value.shape), value.dtype
    if dtype.is_floating_point or dtype.is_complex:
        draw_dtype = torch.complex128 if dtype.is_complex else torch.float64
        drawn = torch.randn(shape, generator=generator, dtype=draw_dtype) + shift
    elif dtype is torch.bool:
        drawn = torch.randint(2, shape, generator=generator)
    else:
        drawn = torch.randint(highest, shape, generator=generator)
    return drawn.to(dtype=dtype, device=value.device)


def _run(node: fx.Node, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """Run the node's operator on copies of these tensors; return None if it raises an error."""
    remaining = iter(inputs)

    def argument_value(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        return next(remaining).clone() if isinstance(value, Tensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), argument_value)
    try:
        with torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # A custom operator may raise any error for pieces.
        return None
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _parts(tensor: Tensor, sbp: Sbp, ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Return the part of the tensor that each rank holds."""
    if isinstance(sbp, Split):
        return [piece.contiguous() for piece in tensor.chunk(ranks, sbp.dim)]
    if isinstance(sbp, PartialSum):
        noise = [_random_like(tensor, generator, 1, 0.0) for _ in range(ranks - 1)]
        return [*noise, tensor - torch.stack(noise).sum(0).to(tensor.dtype)]
    return [tensor] * ranks


def _matches(sbp: Sbp, pieces: Sequence[Tensor], whole: Tensor) -> bool:
    """Return whether the pieces are ``whole`` under ``sbp``."""
    if isinstance(sbp, Broadcast):
        return all(_close(piece, whole) for piece in pieces)
    if any(piece.dim() != whole.dim() for piece in pieces):
        return False
    if isinstance(sbp, PartialSum):
        if not whole.is_floating_point() and not whole.is_complex():
            return False
        return all(piece.shape == whole.shape for piece in pieces) and _close(torch.stack(list(pieces)).sum(0), whole)
    size, remainder = divmod(whole.shape[sbp.dim], len(pieces))
    local = (*whole.shape[: sbp.dim], size, *whole.shape[sbp.dim + 1 :])
    return (
        not remainder
        and all(piece.shape == local for piece in pieces)
        and _close(torch.cat(list(pieces), sbp.dim), whole)
    )


def _close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.is_floating_point() and not left.is_complex():
        return torch.equal(left, right)
    tolerance = max(1e-9, 100 * torch.finfo(left.dtype).eps)
    scale = float(right.abs().nan_to_num(0.0, 0.0).max()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True)


def _described(node: fx.Node, inputs: Sequence[Tensor], ranks: int) -> str:
    remaining = iter(inputs)

    def described(argument: fx.Node) -> str:
        value = argument.meta.get("val")
        if not isinstance(value, Tensor):
            return str(value)
        tensor = next(remaining)
        return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"

    return f"{node.target} {fx.map_arg((node.args, node.kwargs), described)} {ranks}"
