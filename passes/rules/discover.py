"""Signatures of an operator without a rule, found by running it whole and in pieces on random data.

What is found holds for what was tried: shapes, dtypes and arguments of one node, random numbers, small integers. An
operator that does something else on rare values (a threshold far out) can fool it; a registered rule cannot be fooled.

Found signatures are remembered on disk, and tried once more whenever they are read: a file can save the search, but
never vouch for an operator that has changed since.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, is_mutable, pytree
from zerograph.base import cache
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Signature, Split, broadcast, partial_sum
from zerograph.passes.rules.registry import output_values, tensor_arguments

# More elements than this (inputs and outputs of one run) are not tried: the search would take longer than the step.
MOST_ELEMENTS = 2**22
_MOST_CANDIDATES = 256
_DRAWS = 2


def discover(
    node: fx.Node, ranks: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], folder: Path | None = None
) -> tuple[Signature, ...] | None:
    """The signatures of a node's operator over ``ranks`` ranks; None where it cannot be tried.

    Deterministic: every rank finds the same. ``inputs`` and ``outputs`` tell shapes and dtypes; ``folder`` remembers
    what was found; None: :func:`zerograph.base.cache.folder`.
    """
    trial = _trial(node, ranks, inputs, outputs)
    if trial is None:
        return None
    file = _file(node, inputs, ranks, folder or cache.folder("rules"))
    remembered = _read(file)
    # A file may say anything: what the search could not have found is no signature.
    possible = remembered is not None and remembered[:1] == (_whole(node),)
    if remembered and possible and all(trial.allows(one) and trial.holds(one) for one in remembered[1:]):
        return remembered
    found = (_whole(node), *(one for one in trial.candidates() if trial.holds(one)))
    _write(file, found)
    return found


class _Trial:
    """An operator with inputs to try it on: several draws, and what it yields for each."""

    def __init__(self, node: fx.Node, ranks: int, draws: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
        self._node, self._ranks, self._draws = node, ranks, draws

    def candidates(self) -> Iterator[Signature]:
        """Signatures that may hold: what becomes of the outputs is read off the first draw."""
        inputs, _ = self._draws[0]
        choices = sorted(self._splits(inputs), key=lambda sbps: sum(isinstance(sbp, Split) for sbp in sbps))
        for sbps in [*choices[:_MOST_CANDIDATES], *self._sums(inputs)]:
            outputs = self._outputs(sbps)
            if outputs is not None:
                yield Signature(sbps, outputs)

    def allows(self, signature: Signature) -> bool:
        """Return whether :meth:`candidates` may yield it: as many SBPs as tensors, and only dimensions to be split."""
        inputs, _ = self._draws[0]
        if len(signature.inputs) != len(inputs):
            return False
        split = [(one, sbp.dim) for one, sbp in zip(inputs, signature.inputs, strict=True) if isinstance(sbp, Split)]
        if any(dim >= one.dim() or one.shape[dim] < 2 or one.shape[dim] % self._ranks for one, dim in split):
            return False
        return self._outputs(signature.inputs) == signature.outputs

    def holds(self, signature: Signature) -> bool:
        """Whether the operator computes in pieces what it computes whole, on every draw."""
        inputs, wholes = self._draws[0]
        if (len(signature.inputs), len(signature.outputs)) != (len(inputs), len(wholes)):
            return False
        return all(
            (parts := self._in_pieces(inputs, signature.inputs)) is not None
            and all(
                _is(sbp, [part[index] for part in parts], whole)
                for index, (sbp, whole) in enumerate(zip(signature.outputs, wholes, strict=True))
            )
            for inputs, wholes in self._draws
        )

    def _splits(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Sbp, ...]]:
        """One index is split: in each input either one dimension of its size, or none."""
        sizes = {size for tensor in inputs for size in tensor.shape if size > 1 and size % self._ranks == 0}
        for size in sorted(sizes):
            choices: list[list[Sbp]] = [
                [broadcast, *(Split(dim) for dim, one in enumerate(tensor.shape) if one == size)] for tensor in inputs
            ]
            for sbps in itertools.islice(itertools.product(*choices), 4 * _MOST_CANDIDATES):
                if any(isinstance(sbp, Split) for sbp in sbps):
                    yield sbps

    def _sums(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Sbp, ...]]:
        """One input, or all that can be, are partial sums."""
        able = [index for index, tensor in enumerate(inputs) if tensor.is_floating_point() or tensor.is_complex()]
        groups = [(index,) for index in able] + ([tuple(able)] if len(able) > 1 else [])
        for group in groups:
            yield tuple(partial_sum if index in group else broadcast for index in range(len(inputs)))

    def _outputs(self, sbps: tuple[Sbp, ...]) -> tuple[Sbp, ...] | None:
        inputs, wholes = self._draws[0]
        parts = self._in_pieces(inputs, sbps)
        if parts is None:
            return None
        found: list[Sbp] = []
        for index, whole in enumerate(wholes):
            pieces = [part[index] for part in parts]
            # A partial sum in, a partial sum out; else what the pieces look like.
            options: list[Sbp] = [*(Split(dim) for dim in range(whole.dim())), broadcast, partial_sum]
            if any(isinstance(sbp, PartialSum) for sbp in sbps):
                options = [partial_sum]
            sbp = next((option for option in options if _is(option, pieces, whole)), None)
            if sbp is None:
                return None
            found.append(sbp)
        # Whole outputs of split inputs: the operator reads no values there, which the next draw may not show.
        return None if all(isinstance(sbp, Broadcast) for sbp in found) else tuple(found)

    def _in_pieces(self, inputs: Sequence[Tensor], sbps: Sequence[Sbp]) -> list[list[Tensor]] | None:
        """For each rank the outputs that it would compute; None if the operator refuses."""
        generator = torch.Generator().manual_seed(2)
        parts = [_parts(tensor, sbp, self._ranks, generator) for tensor, sbp in zip(inputs, sbps, strict=True)]
        results = [_run(self._node, [part[rank] for part in parts]) for rank in range(self._ranks)]
        return None if any(result is None for result in results) else [r for r in results if r is not None]


def _trial(node: fx.Node, ranks: int, values: Sequence[Tensor], wanted: Sequence[Tensor]) -> _Trial | None:
    target = node.target
    if not isinstance(target, OpOverload) or is_mutable(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if not values or sum(tensor.numel() for tensor in (*values, *wanted)) > MOST_ELEMENTS:
        return None
    draws = []
    for number in range(_DRAWS):
        for highest in (2, 1):
            # Integers may be indices: if one and zero are too large, zeros may do.
            generator = torch.Generator().manual_seed(number)
            inputs = [_drawn(value, generator, highest, 0.5 * number) for value in values]
            outputs = _run(node, inputs)
            if outputs is not None:
                break
        if outputs is None or [one.shape for one in outputs] != [one.shape for one in wanted]:
            return None
        again = _run(node, inputs)
        if again is None or not all(map(_close, again, outputs)) or not all(map(_says_something, outputs)):
            return None
        draws.append((inputs, outputs))
    return _Trial(node, ranks, draws)


def _says_something(output: Tensor) -> bool:
    """Zeros, or numbers that are none, are alike however they came about."""
    if not output.is_floating_point() and not output.is_complex():
        return True
    return bool(output.numel() and output.any() and output.isfinite().double().mean() > 0.5)


def _drawn(value: Tensor, generator: torch.Generator, highest: int, shift: float) -> Tensor:
    shape, dtype = tuple(int(size) for size in value.shape), value.dtype
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        made = torch.randn(shape, generator=generator, dtype=wide) + shift
    elif dtype is torch.bool:
        made = torch.randint(2, shape, generator=generator)
    else:
        made = torch.randint(highest, shape, generator=generator)
    return made.to(dtype=dtype, device=value.device)


def _run(node: fx.Node, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """The node's operator on these tensors, copies of them; None if it raises."""
    remaining = iter(inputs)

    def given(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        return next(remaining).clone() if isinstance(value, Tensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    try:
        with torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # A custom operator may refuse pieces with any error it likes.
        return None
    return [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]


def _parts(tensor: Tensor, sbp: Sbp, ranks: int, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds."""
    if isinstance(sbp, Split):
        return [piece.contiguous() for piece in tensor.chunk(ranks, sbp.dim)]
    if isinstance(sbp, PartialSum):
        noise = [_drawn(tensor, generator, 1, 0.0) for _ in range(ranks - 1)]
        return [*noise, tensor - torch.stack(noise).sum(0).to(tensor.dtype)]
    return [tensor] * ranks


def _is(sbp: Sbp, pieces: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the pieces are ``whole`` under ``sbp``."""
    if isinstance(sbp, Broadcast):
        return all(_close(piece, whole) for piece in pieces)
    if any(piece.dim() != whole.dim() for piece in pieces):
        return False
    if isinstance(sbp, PartialSum):
        if not whole.is_floating_point() and not whole.is_complex():
            return False
        return all(piece.shape == whole.shape for piece in pieces) and _close(torch.stack(list(pieces)).sum(0), whole)
    size, rest = divmod(whole.shape[sbp.dim], len(pieces))
    local = (*whole.shape[: sbp.dim], size, *whole.shape[sbp.dim + 1 :])
    return (
        not rest and all(piece.shape == local for piece in pieces) and _close(torch.cat(list(pieces), sbp.dim), whole)
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    tolerance = max(1e-9, 100 * torch.finfo(one.dtype).eps)
    scale = float(other.abs().nan_to_num(0.0, 0.0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True)


def _whole(node: fx.Node) -> Signature:
    return Signature((broadcast,) * len(tensor_arguments(node)), (broadcast,) * len(output_values(node)))


def _file(node: fx.Node, inputs: Sequence[Tensor], ranks: int, folder: Path) -> Path:
    remaining = iter(inputs)

    def shown(argument: fx.Node) -> str:
        value = argument.meta.get("val")
        if not isinstance(value, Tensor):
            return str(value)
        given = next(remaining)
        return f"{tuple(given.shape)} {given.dtype} {given.device.type}"

    key = f"{node.target} {fx.map_arg((node.args, node.kwargs), shown)} {ranks} {torch.__version__}"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> tuple[Signature, ...] | None:
    """What is remembered; None for nothing, or what :func:`_write` does not write: it is found again."""
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, list) or not all(isinstance(one, list) and len(one) == 2 for one in found):
            return None
        return tuple(Signature(*(tuple(map(_parsed, side)) for side in one)) for one in found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _write(file: Path, found: Sequence[Signature]) -> None:
    """All ranks write the same."""
    text = json.dumps([[[str(sbp) for sbp in side] for side in (one.inputs, one.outputs)] for one in found])
    cache.write(file, text)


def _parsed(text: Any) -> Sbp:
    """Return the SBP that ``str()`` of it is.

    Raises:
        TypeError, ValueError: of none.
    """
    if text in ("B", "P"):
        return broadcast if text == "B" else partial_sum
    found = re.fullmatch(r"S\((\d{1,2})\)", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r:.40} is no SBP")
    return Split(int(found[1]))
