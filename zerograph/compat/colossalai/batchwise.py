"""What may be done along the batch: what means the same on this rank's part as on the whole batch.

A recorded operator is written for one part and runs on all of them laid end to end along the batch's dimension. So it
must leave parts apart, or take all of them together, as a mean does: cutting out "the first half", indexing by the
number of a sample, or appending another batch would mean another thing, without any shape that tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.compat.colossalai.deferred import Meta, name_of
from zerograph.errors import CaptureError

# Where the dimension stands among the arguments, its keyword, and its default.
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
    function: Callable[..., Any], metas: Sequence[Any], tree: pytree.TreeSpec, made: Sequence[Any], parts: int
) -> None:
    """Raise if the call means one thing on a part and another on the whole.

    Args:
        function: the function that is called.
        metas: the arguments, flat, with :class:`Meta` for tensors.
        tree: how the arguments are nested.
        made: the results, flat, likewise.
        parts: number of parts of the batch.

    Raises:
        CaptureError: naming the user's line, and what to do.
    """
    name = name_of(function).removesuffix("()")
    for one in made:
        if isinstance(one, Meta) and not one.parted(parts):
            refuse(f"{name}() compares samples of the batch with each other, or counts them")
    args, kwargs = pytree.tree_unflatten(metas, tree)
    first = args[0] if args else next(iter(kwargs.values()), None)
    tensors = [one for one in metas if isinstance(one, Meta) and one.batch_dim is not None]
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
    elif name in _RESHAPES and isinstance(made[0], Meta):
        _check_reshape(name, first, along, made[0])


def here() -> str:
    """Return the user's running line, on a line of its own."""
    line, code = source.running_line()
    return f"\n  {line}   {code}" if line else ""


def _check_join(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Meta]) -> None:
    dim = {"hstack": 1, "vstack": 0, "row_stack": 0}.get(name)
    if dim is None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    for one in tensors:
        rank = len(one.shape)
        if (0 if name == "hstack" and rank == 1 else dim % rank) == one.batch_dim:
            refuse(f"{name}() concatenates batches")


def _check_index(first: Meta, along: int, index: Any) -> None:
    """Refuse an index of the batch's dimension other than ``:``; every other dimension may be indexed."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dims(one) for one in entries if one is not Ellipsis)
    if any(one is Ellipsis for one in entries):
        at = next(n for n, one in enumerate(entries) if one is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (len(first.shape) - taken)
    dim = 0
    for one in entries:
        if dim <= along < dim + _dims(one) and one != slice(None):
            refuse("[...] picks samples along the batch")
        dim += _dims(one)


def _dims(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index takes.

    Masks do not get here: a call is refused before if the shape of its result depends on values.
    """
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1


def _check_reshape(name: str, first: Meta, along: int, made: Meta) -> None:
    """Refuse a reshape that splits the batch's dimension or merges it with a dimension before it."""
    to = made.batch_dim
    if to is None or math.prod(first.shape[:along]) != math.prod(made.shape[:to]):
        refuse(f"{name}() splits the batch dimension, or merges it with one before it")


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    return [one for one in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(one, int)]


def refuse(what: str) -> NoReturn:
    """Raise a CaptureError: a call before ``engine.step()`` would mean something else on the whole batch."""
    raise CaptureError(
        f"{what}, before engine.step(){here()}\n"
        "The step is made of the whole batch, of which this rank sees its part: the same numbers would mean other "
        "samples there. Keep samples apart (-1, flatten(1), a mask, gather() along another dimension), let the model "
        "or the criterion do it, or look at the values after engine.step()."
    )
