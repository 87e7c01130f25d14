"""FlexAttention as operators with fixed schemas: attention whose scores and mask are functions of positions.

The functions are text, a *modification*: one line of Python that calls operators on 0-d tensors. It is an argument in
the graph as any other, so graphs that are printed, compared between ranks or exported have it. Tensors that the
functions capture are inputs of the operator.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.sizes import largest
from zerograph.ops.definition import define

# Letters of a captured tensor's dimensions: indexed by the batch index, by the head index, or by anything else.
BATCH, HEADS, OTHER = "b", "h", "-"
POSITIONS = ("b", "h", "q", "k")


def scores_of(node: fx.Node) -> tuple[tuple[int, ...], int, torch.dtype] | None:
    """Return the shape of the scores, the channels of keys and values together, and the dtype of the scores.

    Dynamic dimensions have their largest size. None for a node of another operator.
    """
    if node.target not in (flex_attention, flex_attention_backward):
        return None
    first = 0 if node.target is flex_attention else 2
    query, key, value = (argument.meta["val"] for argument in node.args[first : first + 3])  # type: ignore[union-attr]
    batch, heads, queries, width = largest(query.shape)
    keys, channels = largest((key.shape[2], value.shape[3]))
    return (batch, heads, queries, keys), width + channels, _working_dtype(query)


def modification_text(graph: fx.Graph) -> str:
    """Return a graph of operators on its placeholders as one line of Python that defines a function ``mod``.

    Raises:
        ValueError: the graph has another node than a call of an operator; the message names it.
    """
    statements, result = [], "None"
    for node in graph.nodes:
        if node.op == "output":
            result = _shown(node.args[0])
        elif node.op == "call_function":
            arguments = [_shown(argument) for argument in node.args]
            # A tensor is made on the device on which the function runs.
            arguments += [f"{name}={_shown(value)}" for name, value in node.kwargs.items() if name not in _IMPLIED]
            statements.append(f"{node.name} = {_called(node)}({', '.join(arguments)})")
        elif node.op != "placeholder":
            raise ValueError(f"{node.op} {node.target}")
    parameters = ", ".join(node.name for node in graph.find_nodes(op="placeholder"))
    return f"def mod({parameters}): {'; '.join([*statements, f'return {result}'])}"


_IMPLIED = ("device", "pin_memory", "layout")


def _called(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if not isinstance(node.target, _torch.OpOverload):
        raise ValueError(str(node.target))
    return f"ops.{node.target}"


class _Name(str):
    __repr__ = str.__str__


def _shown(argument: Any) -> str:
    named = fx.map_arg(argument, lambda node: _Name(node.name))
    return repr(list(named) if isinstance(named, (list, tuple)) else named)


@functools.lru_cache(maxsize=256)
def modification(text: str) -> Callable[..., Tensor]:
    """Return the function that :func:`modification_text` describes. It is interpreted: no text runs as Python.

    Raises:
        ValueError: the text is anything else than one function whose statements call one operator each.
    """
    parameters, calls, result = _parsed(text)

    def run(*tensors: Tensor) -> Tensor:
        values: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        values.update(zip(parameters, tensors, strict=True))
        for name, function, args, kwargs in calls:
            values[name] = function(
                *(_value(one, values) for one in args), **{key: _value(one, values) for key, one in kwargs.items()}
            )
        computed: Tensor = _value(result, values)
        return computed

    return run


def operators_in(text: str) -> list[_torch.OpOverload]:
    """Return the operators that a modification calls.

    Raises:
        ValueError: it is no modification.
    """
    return [function for _, function, _, _ in _parsed(text)[1] if function is not operator.getitem]


_Call = tuple[str, Any, list[ast.expr], dict[str, ast.expr]]


def _parsed(text: str) -> tuple[list[str], list[_Call], ast.expr]:
    """Return the names of the parameters, the calls with the name of each result, and what is returned."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.80} is no Python: {error}") from None
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or not isinstance(body[0].body[-1], ast.Return):
        raise ValueError(f"{text!r:.80} is not one function")
    function, names = body[0], [one.arg for one in body[0].args.args]
    result, calls = body[0].body[-1].value or ast.Constant(None), [_call(one) for one in function.body[:-1]]
    if function.decorator_list or ast.unparse(function.args) != ", ".join(names) or function.returns is not None:
        raise ValueError(f"{text!r:.80} has more than names as parameters")
    known: dict[str, Any] = dict.fromkeys(("inf", "nan", *names), 0)
    for name, _, args, kwargs in calls:
        for argument in (*args, *kwargs.values()):
            _value(argument, known)
        known[name] = 0
    _value(result, known)
    return names, calls, result


def _call(statement: ast.stmt) -> _Call:
    if (
        not isinstance(statement, ast.Assign)
        or not isinstance(statement.value, ast.Call)
        or len(statement.targets) != 1
        or not isinstance(statement.targets[0], ast.Name)
    ):
        raise ValueError(f"{ast.unparse(statement)!r:.80} does not assign the result of one call")
    name, call = ast.unparse(statement.value.func), statement.value
    function: Any = operator.getitem
    if name != "getitem":
        path = name.split(".")
        function = torch.ops if path[0] == "ops" and len(path) == 4 else None
        for part in path[1:]:
            function = getattr(function, part, None)
    if function is not operator.getitem and not isinstance(function, _torch.OpOverload):
        raise ValueError(f"{name!r:.80} is no operator")
    if any(one.arg is None for one in call.keywords):
        raise ValueError(f"{ast.unparse(call)!r:.80} takes its arguments apart")
    return statement.targets[0].id, function, call.args, {str(one.arg): one.value for one in call.keywords}


_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def _value(expression: ast.expr, values: Mapping[str, Any]) -> Any:
    """Evaluate a name, a number or a text, a constant of torch, or a list of these."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name) and expression.id in values:
        return values[expression.id]
    if isinstance(expression, (ast.List, ast.Tuple)):
        return [_value(entry, values) for entry in expression.elts]
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return -_value(expression.operand, values)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        constant = getattr(torch, expression.attr, None) if expression.value.id == "torch" else None
        if isinstance(constant, _CONSTANTS):
            return constant
    raise ValueError(f"{ast.unparse(expression)!r:.80} is no plain value")


def _over_all_positions(
    text: str, before: Sequence[Tensor], sizes: Sequence[int], captured: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Evaluate a modification at every position [batch, heads, queries, keys].

    Args:
        text: the modification.
        before: tensors of all positions; the function takes one element of each first.
        sizes: the sizes of the four dimensions.
        captured: tensors that the function takes whole, last.
        device: the device of the positions.
    """
    mapped, whole = (0,) * len(before), (None,) * len(captured)
    function = modification(text)
    for dim in reversed(range(4)):
        positions = tuple(0 if dim == other else None for other in range(4))
        function = torch.vmap(function, (*mapped, *positions, *whole))
    return function(*before, *(torch.arange(size, device=device) for size in sizes), *captured)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    score_mod: str,
    mask_mod: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention by products, with all scores in memory, in fp32 or, for fp64, in fp64.

    A query without any key yields zeros, and the log-sum-exp -inf.
    """
    batch, heads, queries, _ = query.shape
    dtype = _working_dtype(query)
    key, value = (each.repeat_interleave(heads // each.shape[1], 1).expand(batch, -1, -1, -1) for each in (key, value))
    sizes = (batch, heads, queries, key.shape[2])
    scores = (query.to(dtype) @ key.to(dtype).transpose(-2, -1)) * scale
    mask = None
    if mask_mod:
        mask = _over_all_positions(mask_mod, (), sizes, captured, query.device)
        # Masked scores have no gradient, whatever the derivative of score_mod is there.
        scores = scores.masked_fill(~mask, 0)
    if score_mod:
        scores = _over_all_positions(score_mod, (scores,), sizes, captured, query.device).to(dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    weights = scores.softmax(-1).masked_fill(empty, 0)
    lse = scores.logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf).squeeze(-1)
    return weights.to(query.dtype) @ value, lse


def _working_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return an empty result, in the layout of the query: positions before heads if they are so there."""
    batch, heads, queries, _ = query.shape
    width = value.shape[3]
    if _torch.size_hint(query.stride(1)) < _torch.size_hint(query.stride(2)):
        return query.new_empty((batch, queries, heads, width)).transpose(1, 2)
    return query.new_empty((batch, heads, queries, width))


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_output(query, value), query.new_empty(query.shape[:3], dtype=_working_dtype(query))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    axes: Sequence[str],
    score_mod: str,
    mask_mod: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the result [batch, heads, queries, channels] and the log-sum-exp of the scores [batch, heads, queries]."""
    out, lse = _forward_fake(query, key, value)
    if out.numel() or lse.numel():
        attended, normalizers = _dense(query, key, value, captured, score_mod, mask_mod, scale)
        out.copy_(attended)
        lse.copy_(normalizers)
    return out, lse


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    axes: Sequence[str],
    score_mod: str,
    mask_mod: str,
    scale: float,
    differentiable: Sequence[int],
) -> list[Tensor]:
    tensors = (query, key, value, *(captured[index] for index in differentiable))
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    axes: Sequence[str],
    score_mod: str,
    mask_mod: str,
    scale: float,
    differentiable: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of query, key, value and the ``differentiable`` ones of the captured tensors.

    Nothing of forward is saved: the scores are computed again.
    """
    sources = [query, key, value, *(captured[index] for index in differentiable)]
    if not query.numel() or not value.numel():
        return [torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources]
    with torch.enable_grad():
        leaves = [source.detach().requires_grad_() for source in sources]
        captured = list(captured)
        for index, leaf in zip(differentiable, leaves[3:], strict=True):
            captured[index] = leaf
        query, key, value = leaves[:3]
        out, lse = _dense(query, key, value, captured, score_mod, mask_mod, scale)
        outputs, gradients = [out], [grad_out]
        if grad_lse is not None:
            outputs, gradients = [out, lse], [grad_out, grad_lse]
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)
    return [gradient.contiguous() for gradient in found]


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] captured, str[] axes, str score_mod, str mask_mod, float scale"
)
flex_attention = define("flex_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
flex_attention_backward = define(
    "flex_attention_backward",
    f"(Tensor grad_out, Tensor? grad_lse, {_ARGUMENTS}, int[] differentiable) -> Tensor[]",
    _backward,
    _backward_fake,
)
