"""Check that an operation along the batch means the same on this rank's part as on the whole batch.

A recorded operator was called on one part, and runs on all parts concatenated along the batch dimension. It may treat
samples separately, or reduce over all of them, as a mean does. Taking "the first half", indexing by the number of a
sample, or appending another batch would mean something else on the whole batch, and no shape would show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.loops.deferred import Meta, name_of
from zerograph.loops.words import words

# The index of the dimension among the arguments, its keyword, and its default.
_PICKS: Mapping[str, tuple[int, str, int | None]] = {
    "chunk": (2, "dim", 0),
    "gather": (1, "dim", None),
    "index_add": (1, "dim", None),
    "index_copy": (1, "dim", None),
    "index_fill": (1, "dim", None),
    "index_select": (1, "dim", None),
    "narrow": (1, "dim", None),
    "roll": (2, "dims", None),
    "scatter": (1, "dim", None),
    "scatter_add": (1, "dim", None),
    "select": (1, "dim", None),
    "split": (2, "dim", 0),
    "split_with_sizes": (2, "dim", 0),
    "take_along_dim": (2, "dim", None),
    "tensor_split": (2, "dim", 0),
    "unbind": (1, "dim", 0),
}
_JOINS = ("cat", "concat", "concatenate", "hstack", "vstack", "row_stack")
_RESHAPES = ("flatten", "reshape", "reshape_as", "unflatten", "view", "view_as")


def check(
    function: Callable[..., Any], metas: Sequence[Any], tree: pytree.TreeSpec, results: Sequence[Any], parts: int
) -> None:
    """Raise if a call means something else on the whole batch than on a part.

    Args:
        function: the function that is called.
        metas: the arguments, flat, with :class:`Meta` for tensors.
        tree: how the arguments are nested.
        results: the results, flat, with :class:`Meta` for tensors.
        parts: number of parts of the batch.

    Raises:
        CaptureError: with the user's line and advice.
    """
    name = name_of(function).removesuffix("()")
    for result in results:
        if isinstance(result, Meta) and not result.parted(parts):
            refuse(f"{name}() compares samples of the batch with each other, or counts them")
    args, kwargs = pytree.tree_unflatten(metas, tree)
    first = args[0] if args else next(iter(kwargs.values()), None)
    tensors = [meta for meta in metas if isinstance(meta, Meta) and meta.batch_dim is not None]
    if not tensors or name.startswith("."):
        return
    if name in _JOINS:
        _check_join(name, args, kwargs, tensors)
    elif not isinstance(first, Meta) or (along := first.batch_dim) is None:
        return
    elif name == "__getitem__":
        _check_index(first, along, args[1])
    elif name in _PICKS:
        at, key, default = _PICKS[name]
        dim = args[at] if len(args) > at else kwargs.get(key, default)
        if dim is None or (isinstance(dim, int) and dim % len(first.shape) == along):
            refuse(f"{name}() picks samples along the batch")
    elif name == "take":
        refuse("take() picks samples out of the batch")
    elif name in ("repeat", "tile"):
        times = _numbers(args[1:], kwargs)
        if len(times) >= len(first.shape) - along and times[along - len(first.shape)] != 1:
            refuse(f"{name}() repeats the batch")
    elif name in _RESHAPES and isinstance(results[0], Meta):
        _check_reshape(name, first, along, results[0])


def here() -> str:
    """Return the user's running line, on a line of its own."""
    line, code = source.running_line()
    return f"\n  {line}   {code}" if line else ""


def _check_join(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Meta]) -> None:
    dim = {"hstack": 1, "vstack": 0, "row_stack": 0}.get(name)
    if dim is None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    for tensor in tensors:
        rank = len(tensor.shape)
        if (0 if name == "hstack" and rank == 1 else dim % rank) == tensor.batch_dim:
            refuse(f"{name}() concatenates batches")


def _check_index(first: Meta, along: int, index: Any) -> None:
    """Refuse an index of the batch's dimension other than ``:``; every other dimension may be indexed."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dims(entry) for entry in entries if entry is not Ellipsis)
    if any(entry is Ellipsis for entry in entries):
        at = next(n for n, entry in enumerate(entries) if entry is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (len(first.shape) - taken)
    dim = 0
    for entry in entries:
        if dim <= along < dim + _dims(entry) and entry != slice(None):
            refuse("[...] picks samples along the batch")
        dim += _dims(entry)


def _dims(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index takes.

    Masks do not get here: a call is refused before if the shape of its result depends on values.
    """
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1


def _check_reshape(name: str, first: Meta, along: int, result: Meta) -> None:
    """Refuse a reshape that splits the batch's dimension or merges it with a dimension before it."""
    to = result.batch_dim
    if to is None or math.prod(first.shape[:along]) != math.prod(result.shape[:to]):
        refuse(f"{name}() splits the batch dimension, or merges it with one before it")


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    return [leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, int)]


def refuse(what: str) -> NoReturn:
    """Raise a CaptureError: a call before the step would mean something else on the whole batch."""
    raise CaptureError(
        f"{what}, before {words().step}{here()}\n"
        "The step runs on the whole batch, of which this rank sees one part: the same numbers would mean other "
        "samples there. Keep samples apart (-1, flatten(1), a mask, gather() along another dimension), let the model "
        f"or the criterion do it, or look at the values after {words().step}."
    )
