"""Objects of torchmetrics in a recorded step: they are called after the step, with the values of this rank's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn

from torch import Tensor, nn

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError


def is_metric(value: object) -> bool:
    """Return whether an object is a metric of torchmetrics, or a collection of them."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(value).__mro__)


class NoValue:
    """Something that a step has no value of while it is traced: using it is an error.

    Attributes:
        number: the number of the call of a metric that returned it.
    """

    number = -1

    message = "the value of a metric is used in a step that is one graph\nIt exists after the step: log it as it is."

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(self.message)

    __index__ = __int__ = __float__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __getitem__ = __iter__ = __neg__ = __rtruediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Use:
    """A call of a metric, or of its ``update()``.

    Attributes:
        method: makes the call.
        leaves: the flat arguments, with ``Tensor`` for tensors.
        tree: how they are nested.
        tensors: those of the trace, detached.
    """

    method: Callable[..., Any]
    leaves: Sequence[Any]
    tree: pytree.TreeSpec
    tensors: Sequence[Tensor]

    def run(self, values: Sequence[Tensor]) -> Any:
        """Make the call with these values of its tensors; return its result."""
        remaining = iter(values)
        leaves = [next(remaining) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.method(*args, **kwargs)


@contextlib.contextmanager
def collected_uses(module: nn.Module) -> Iterator[list[Use]]:
    """Collect the calls of a module's metrics inside the block instead of making them."""
    uses: list[Use] = []

    def collecting(method: Callable[..., Any]) -> Callable[..., NoValue]:
        def call(*args: Any, **kwargs: Any) -> NoValue:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, bool, NoneType))]
            if others:
                line, code = source.running_line()
                raise CaptureError(
                    f"a metric gets a {type(others[0]).__name__} in a step that is one graph\n  {line}   {code}\n"
                    "Give it tensors, or update it in on_train_batch_end or on_validation_batch_end."
                )
            tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
            result = NoValue()
            result.number = len(uses)
            uses.append(Use(method, [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree, tensors))
            return result

        return call

    def refuse(*_: Any, **__: Any) -> NoReturn:
        line, code = source.running_line()
        raise CaptureError(
            f"a metric is computed or reset in a step that is one graph\n  {line}   {code}\n"
            "It is updated after the step: log the metric itself, or compute it in on_train_batch_end, "
            "on_validation_batch_end or at the end of the epoch."
        )

    metrics: list[Any] = [one for one in module.modules() if is_metric(one)]
    before = [dict(vars(one)) for one in metrics]
    for one in metrics:
        vars(one).update(forward=collecting(one), update=collecting(one.update), compute=refuse, reset=refuse)
    try:
        yield uses
    finally:
        for one, attributes in zip(metrics, before, strict=True):
            for name in ("forward", "update", "compute", "reset"):
                vars(one).pop(name)
                if name in attributes:
                    vars(one)[name] = attributes[name]
