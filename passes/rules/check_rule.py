"""Check the rule of an operator: run it whole and in pieces, and compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.errors import ConfigError
from zerograph.ir.sbp import show
from zerograph.passes.rules.discover import Trial, trial_of
from zerograph.passes.rules.registry import all_broadcast, rule_of, signatures_of


def check_rule(operator: Any, *examples: Any, ranks: int = 2, **options: Any) -> None:
    """Check that an operator computes in pieces, as its rule splits it, what it computes whole.

    The operator runs with these examples, and with random tensors of their shapes. Each way to split that the rule
    allows for ``ranks`` ranks is tried, partial sums included. ``zg.check_rule(scaled, torch.randn(4, 6), 0.5)``.

    Args:
        operator: as for :func:`zerograph.register_rule`.
        examples: arguments of the operator. Sizes that ``ranks`` divides are tried in pieces.
        ranks: the number of pieces.
        options: keyword arguments of the operator.

    Raises:
        ConfigError: the rule is wrong; names the way to split. Or there is no rule, or it splits nothing here.
        CaptureError: the rule does not fit the shapes.
    """
    overload = next((one for one in _torch.overloads(operator) if _takes(one, examples, options)), None)
    if overload is None:
        kinds = ", ".join(type(one).__name__ for one in examples)
        raise ConfigError(f"check_rule() takes an operator and its arguments: {operator!r:.60} takes no ({kinds})")
    if type(ranks) is not int or ranks < 2:
        raise ConfigError(f"check_rule(ranks={ranks!r}) cuts nothing into pieces: give 2 or more")
    if rule_of(overload) is None:
        raise ConfigError(f"{overload} has no rule: register one by zg.register_rule()")
    node = _node(overload, examples, options)
    outputs = [one for one in pytree.tree_leaves(node.meta["val"]) if isinstance(one, Tensor)]
    inputs = [one for one in pytree.tree_leaves((examples, options)) if isinstance(one, Tensor)]
    if any(one.is_meta for one in inputs):
        raise ConfigError("check_rule() compares values, and a tensor on the meta device has none")
    trial = trial_of(node, ranks, inputs, outputs)
    if trial is None:
        raise ConfigError(
            f"{overload} cannot be tried: it draws random numbers, writes to an argument, raises an error for random "
            "tensors of these shapes, or has no finite result other than zero"
        )
    trial = Trial(node, ranks, [(inputs, outputs), *trial.draws])
    signatures = [one for one in signatures_of(node, ranks) or () if one != all_broadcast(node)]
    if not signatures:
        raise ConfigError(
            f"the rule {rule_of(overload)} splits nothing of these shapes over {ranks} ranks: give examples whose "
            f"sizes are multiples of {ranks}"
        )
    for signature in signatures:
        if not trial.holds(signature):
            ways = [f"({', '.join(show((sbp,)) for sbp in sbps)})" for sbps in (signature.inputs, signature.outputs)]
            raise ConfigError(
                f"the rule {rule_of(overload)} is wrong: with inputs placed {ways[0]} on {ranks} ranks the results are "
                f"not those of the whole operator placed {ways[1]}\nA dimension along which the operator combines "
                "values is marked '!'; a result is linear in an input only if it is 0 where the input is."
            )


def _takes(operator: _torch.OpOverload, examples: tuple[Any, ...], options: dict[str, Any]) -> bool:
    try:
        with torch.no_grad():
            operator(*examples, **options)
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


def _node(operator: _torch.OpOverload, examples: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
    """Return a node of the operator on these arguments, with the results as its value."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"input{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    args, kwargs = pytree.tree_map(placed, (examples, options))
    node = graph.call_function(operator, args, kwargs)
    with torch.no_grad():
        node.meta["val"] = operator(*examples, **options)
    return node
