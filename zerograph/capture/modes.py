"""Modes around ``build()`` while it is traced: they record where operators come from, and refuse some of them."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.base.recording import followed, unfollowed
from zerograph.capture.random_operators import known_truth, note_comparison
from zerograph.capture.refused_calls import COLLECTIVE_NAMESPACES, collective_refused, is_asked_by_user
from zerograph.errors import CaptureError, InputError, ZeroGraphError
from zerograph.ir.metadata import Origin
from zerograph.passes.rules.registry import rule_of

aten = torch.ops.aten

ONE_GRAPH = (
    "A traced step is one graph for all values. Use torch.where, or return the tensor and branch outside build()."
)


class Recorder(_torch.PlainMode):
    """A mode that records each operator's phase, module and source line, and refuses operators that read values.

    Operators of ``torch.library.triton_op`` are traced through, unless they have a rule.
    """

    # They would fail without the user's line.
    supports_higher_order_operators = True

    def __init__(self, module_path: Callable[[Sequence[nn.Module] | None], str], reads: list[CaptureError]) -> None:
        """Create the mode.

        Args:
            module_path: what :func:`module_paths` yields.
            reads: gets the errors for operators that read values, see :func:`reads_uncaught`.
        """
        super().__init__()
        self._module_path, self._reads = module_path, reads
        self._forward: dict[int, Origin] = {}
        self._modules: defaultdict[tuple[str, Any], dict[str, None]] = defaultdict(dict)
        # The operators of triton_op whose functions run.
        self._entered: list[_torch.OpOverload] = []

    @unfollowed
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and annotate its nodes.

        Raises:
            CaptureError: it reads values, is a collective, changes a tensor outside the step, or has a result whose
                shape depends on values.
        """
        if func is torch.ops.prim.device.default:
            # Autograd asks twice for each operator. This answer saves the way through every mode.
            return args[0].device
        if not isinstance(func, _torch.OpOverload):
            raise self._higher_order_refused(func)
        if any(getattr(one, "has_parts_of_ranks", False) for one in types):
            raise CaptureError(
                "a zg.GlobalTensor is read that is no argument, such as one that an earlier call has kept"
            )
        if self._entered and (result := self._of_composite(func, args, kwargs or {})) is not NotImplemented:
            return result
        if (truth := known_truth(func, args)) is not None:
            return truth
        if func in _READS_VALUES:
            self._reads.append(source.refusal(_READS_VALUES[func], ONE_GRAPH))
            raise self._reads[-1]
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise collective_refused(func.name().removeprefix(f"{func.namespace}::"))
        if str(func) in _VARLEN and args[0].device.type == "cpu":
            raise source.refusal(f"{func} runs on accelerators only", _PACKED_ROWS)
        if (body := _torch.triton_body(func)) is not None and rule_of(func) is None:
            return self._inlined(func, body, args, kwargs or {})
        if _torch.is_mutable(func):
            _refuse_writes_outside(func, args, kwargs or {})
        with _torch.annotated(self._annotations(func)):
            result = func(*args, **(kwargs or {}))
        note_comparison(func, args, result)
        if (
            func in _OBSERVERS
            and args[_PER_CHANNEL] == (True,)
            and args[_RUNNING].shape != args[0].shape[args[_AXIS] :][:1]
        ):
            raise _reshaped(f"of shape {tuple(args[_RUNNING].shape)}")
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(_torch.depends_on_values(size) for one in results for size in one.shape):
            raise source.refusal(
                f"build() makes a tensor whose shape depends on values ({func})",
                f"A step graph has fixed shapes. {ADVICE_BY_OPERATOR.get(func, _ALL_ROWS)}",
            )
        return result

    def _inlined(self, operator: Any, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the function of an operator in its place. Autograd has seen the operator, and sees nothing of it."""
        self._entered.append(operator)
        try:
            with self:
                return followed(body)(*args, **kwargs)
        finally:
            self._entered.pop()

    def _of_composite(self, operator: _torch.OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator that others define through these; return NotImplemented for any other operator.

        Below autograd they arrive whole.
        """
        with self:
            return operator.decompose(*args, **kwargs)

    def _higher_order_refused(self, operator: Any) -> CaptureError:
        name = getattr(operator, "__name__", str(operator))
        if not name.startswith("triton_kernel"):
            return source.refusal(f"build() calls {name}, an operator on functions", ONE_GRAPH)
        whole = self._entered[-1].name() if self._entered else "your::operator"
        how = "" if self._entered else "Put the call into a function with torch.library.triton_op. "
        return source.refusal(
            "build() launches a kernel of Triton, which is no operator",
            f'{how}Give the operator a rule, zg.register_rule("{whole}", ...): it is then one operator of the graph.',
        )

    def _annotations(self, func: Any) -> dict[str, Any]:
        """Return the annotations of the running operator's nodes."""
        backward = _torch.backward_sequence_number()
        if backward is None:
            forward = Origin("forward", self._module_path(None), *source.running_line())
            self._modules[forward.source, func][forward.module] = None
            self._forward.setdefault(_torch.forward_sequence_number(), forward)
            return {"origin": forward}
        # A backward node has the sequence number of its forward operator, and so belongs to its line.
        forward = self._forward.get(backward, Origin("forward"))
        recomputing = _torch.recomputing_modules()
        if recomputing is not None:
            line, code = source.running_line()
            module = self._module_path(recomputing) or self._nearest(line, func, forward.module)
            forward = Origin("forward", module, line, code)
        # With create_graph=True, and in a checkpoint, backward creates autograd nodes, whose backward belongs to the
        # same line.
        self._forward.setdefault(_torch.forward_sequence_number(), forward)
        backward_origin = Origin("backward", forward.module, forward.source, forward.code)
        return {"origin": backward_origin} if recomputing is None else {"origin": backward_origin, "recomputed": True}

    def _nearest(self, line: str, func: Any, module: str) -> str:
        """Return the module nearest to ``module`` among those that ran ``func`` on the line.

        A checkpoint calls functions without entering the modules that they belong to.
        """
        parts = module.split(".")

        def common(path: str) -> int:
            pairs = zip(path.split("."), parts, strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        return max(self._modules.get((line, func), ()), key=common, default=module)


def _refuse_writes_outside(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse a write to a tensor outside the step, which the trace would do once and the step never."""
    for written in _torch.written_tensors(func, args, kwargs):
        if not isinstance(written, _torch.FakeTensor):
            raise source.refusal(
                f"build() changes a tensor of shape {tuple(written.shape)} that is no buffer of the graph's modules",
                "Register it with register_buffer() in the module's __init__: buffers are part of the step.",
            )


class FunctionMode(TorchFunctionMode):
    """A mode of ``build()`` that refuses what no operator shows, and unfuses attention with dropout.

    No tracer sees ``parameter.data = ...``, nor a read of a tensor's value by its text or as an array. Checks of
    libraries are left out. Fused kernels of accelerators draw a mask of dropout from a generator of their own; those of
    the CPU have no dropout.

    Args:
        reads: gets the errors of reads, see :func:`reads_uncaught`.
    """

    def __init__(self, reads: list[CaptureError]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function.

        Raises:
            CaptureError: it assigns to ``data``, or reads a value.
        """
        if func == _SET_DATA:
            raise source.refusal(
                "build() assigns to .data, which tracing does not see",
                "Write the values with copy_() under torch.no_grad().",
            )
        if func is _ATTEND and ((kwargs or {}).get("dropout_p") or any(args[4:5])):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        if func in (Tensor.__bool__, Tensor.item):
            truth = passing(sys._getframe(1), is_number=func is Tensor.item and args[0].dtype != torch.bool)
            if truth is not None:
                return truth
        # Libraries put tensors into messages that nobody reads.
        if func in _READS and (func not in _TEXTS or is_asked_by_user(sys._getframe(1), _makes_texts)):
            raise self._refused(_READS[func])
        is_list = func in _OF_NUMBERS and len(args) > 0 and isinstance(args[0], (list, tuple))
        if is_list and any(isinstance(one, _torch.FakeTensor) for one in pytree.tree_leaves(args[0])):
            raise self._refused(f"torch.{func.__name__}() of a list of tensors, where torch.stack() reads none")
        # Code has kept a function of torch that a script has replaced since.
        return getattr(func, "torchs", func)(*args, **(kwargs or {}))

    def _refused(self, what: str) -> CaptureError:
        self._reads.append(source.refusal(f"{_READ}: {what}", ONE_GRAPH))
        return self._reads[-1]


_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
# The text of a traced tensor, or what is made of its memory.
_TEXTS = {Tensor.__repr__: "its text", Tensor.__format__: "its text"}
_READS = {
    **_TEXTS,
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy",
    Tensor.__dlpack__: "__dlpack__()",
    Tensor.__reduce_ex__: "pickle",
}
_OF_TEXTS = (__file__, *(sys.modules[name].__file__ for name in ("torch._tensor", "torch.overrides")))


def _makes_texts(frame: FrameType) -> bool:
    """Return whether a frame makes texts for others: torch's, the standard library's, a dataclass's, of any logging."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file in _OF_TEXTS or source.is_standard(file) or (file, name) == ("<string>", "__repr__"):
        return True
    return isinstance(frame.f_locals.get("self"), (logging.Handler, logging.Formatter))


_ATTEND = F.scaled_dot_product_attention
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_READ = "build() read a tensor's value while the step was being traced"
_READS_VALUES = {
    aten._local_scalar_dense.default: _READ,
    aten.equal.default: "build() compared two tensors' values while the step was being traced",
}


# Attention over documents that cumulative lengths divide. The first operator is of torch.nn.attention.varlen.
_VARLEN = ("torch_attn._varlen_attn.default", "aten._flash_attention_forward.default")
_PACKED_ROWS = (
    "Pack documents into rows of one length, pass ids of the documents [rows, length], and mask with them: "
    "scaled_dot_product_attention(attn_mask=ids[:, None, :, None] == ids[:, None, None, :]), or flex_attention()."
)

_ALL_ROWS = (
    "Keep all rows, and multiply by the mask or use torch.where, instead of selecting by it; a mean is then the sum "
    "divided by mask.sum(). Experts that pick their tokens run on all of them, each result weighted by the router, by "
    "0 where a token is another expert's (a model of transformers: model.set_experts_implementation('batched_mm'))."
)
# What to do instead of an operator whose result's shape depends on values.
ADVICE_BY_OPERATOR = {
    aten._pack_padded_sequence.default: "pack_padded_sequence() leaves out padding: run the recurrent module on the "
    "padded rows instead. Of its output [rows, length, features] take position length - 1 of each row, "
    "output[torch.arange(len(lengths)), lengths - 1], or mask the positions from length on. A bidirectional module "
    "reads padding first in its second direction.",
    aten.bincount.default: "Give the number of bins, torch.bincount(x, minlength=n), more than the largest value.",
    aten.repeat_interleave.Tensor: "Give output_size=, or repeat all rows alike.",
    **dict.fromkeys(
        (aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
        "Count or mark with a table of all possible values, torch.bincount(x, minlength=n), or call unique() on the "
        "batch outside build().",
    ),
}


# Quantization per channel: the first call gives the running minimum and maximum one entry for each channel.
_OBSERVERS = (aten._fused_moving_avg_obs_fq_helper.default, aten._fused_moving_avg_obs_fq_helper_functional.default)
_RUNNING, _AXIS, _PER_CHANNEL = 3, 10, slice(11, 12)


def check_shapes(specs: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    """Refuse a forward that has given a buffer another shape than ``specs`` has.

    Raises:
        CaptureError: names the buffer.
    """
    for name, spec in specs.items():
        if tuple(buffers[name].shape) != tuple(spec.shape):
            raise _reshaped(name)


def _reshaped(buffer: str) -> CaptureError:
    return source.refusal(
        f"the first forward gives the buffer {buffer} another shape",
        "Call the model once on a batch before zg.prepare(), or before the graph: with torch.no_grad(): model(x)",
    )


@contextlib.contextmanager
def module_paths(root: nn.Module) -> Iterator[Callable[[Sequence[nn.Module] | None], str]]:
    """Yield a function that returns the qualified name of the module whose forward is running.

    For a sequence of modules it returns the name of the first one inside ``root``, or ``""``.
    """
    names = {id(module): name for name, module in root.named_modules()}
    stack: list[str] = []

    # A checkpoint enters modules in backward, and leaves them by an exception, which calls no hook.
    def enter(module: nn.Module, _: Any) -> None:
        if _torch.backward_sequence_number() is None:
            stack.append(names.get(id(module), stack[-1] if stack else ""))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if _torch.backward_sequence_number() is None:
            stack.pop()

    def path(modules: Sequence[nn.Module] | None) -> str:
        if modules is None:
            return stack[-1] if stack else ""
        return next((names[id(module)] for module in modules if id(module) in names), "")

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield path
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def reads_uncaught(reads: list[CaptureError]) -> Iterator[None]:
    """At the end raise the error of a read that the user's code has caught, or a function of C that it calls.

    What follows a caught error is not what follows the value. Libraries, and operators of numpy, try several ways: what
    they catch themselves is no read.

    Args:
        reads: the errors of reads since the beginning of the context.
    """
    try:
        yield
        place = ""
    except ZeroGraphError:
        reads.clear()
        raise
    except Exception as error:
        place, _ = source.raising_line(error.__traceback__)
        if not any(_is_caught(read, place) for read in reads):
            raise
    caught = next((read for read in reads if _is_caught(read, place)), None)
    # An error keeps the frames that it has passed through.
    reads.clear()
    if caught is not None:
        raise caught


def _is_caught(read: CaptureError, place: str) -> bool:
    """Return whether the error of a read has passed through the user's code, or became another error at this place."""
    line, _ = source.raising_line(read.__traceback__, own=True)
    return bool(line) or (bool(place) and f"  {place} " in str(read))


_WRONG_CALL = re.compile(r"build\(\) (missing|takes|got)")
# Functions of torch that look into the memory of a tensor.
_NO_MEMORY = re.compile("its data is not allocated yet|Not available for 'meta' device type")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Translate torch's errors about what cannot be traced into the user's terms."""
    try:
        yield
    except (_torch.DataDependentOutputException, _torch.DynamicOutputShapeException) as error:
        place = source.raising_line(error.__traceback__)
        raise source.refusal(f"build() needs a tensor's value for {error.func}", ONE_GRAPH, place) from None
    except TypeError as error:
        # Python names the function; a call inside of the user's build() has a line of its own.
        if _WRONG_CALL.search(str(error)) is None or source.raising_line(error.__traceback__)[0]:
            raise
        line, code = source.running_line()
        raise InputError(
            f"the graph is called with other arguments than its build() takes: {error}\n  {line}   {code}\n"
            "A graph is called as its build() would be, without self."
        ) from None
    except RuntimeError as error:
        if isinstance(error.__cause__, CaptureError) and not isinstance(error, ZeroGraphError):
            # torch.testing puts an error of its own around any other.
            raise error.__cause__ from None
        if "torch.distributed" in str(error) and "not supported under torch.compile" in str(error):
            # From torch.distributed.nn, under names that a user's module has imported.
            raise collective_refused(str(error).split(" ")[0], error.__traceback__) from None
        if _NO_MEMORY.search(str(error)):
            raise source.refusal(f"{_READ}: its memory", ONE_GRAPH, source.raising_line(error.__traceback__)) from None
        if "grad can be implicitly created only for scalar outputs" not in str(error):
            raise
        raise source.refusal(
            "backward() was called on a tensor that is not a scalar",
            "Reduce the loss first, with .mean() or .sum().",
            source.raising_line(error.__traceback__),
        ) from None


def passing(frame: FrameType | None, *, is_number: bool) -> Any:
    """Return the value with which a library's check passes, for the read that a frame makes; None if it is no check.

    Libraries check values: ``if labels.max() >= vocabulary: raise``. A step is one graph for all values, and cannot
    look; the error that such a check would raise concerns the library's own use. A check in the user's own code stays
    an error, as every read of a value.

    Args:
        frame: the frame that reads a value of a tensor.
        is_number: the value is a number, and may be compared before it decides; else it is a truth.
    """
    while frame is not None and frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
        frame = frame.f_back
    if (
        frame is None
        or not source.is_users(frame.f_code.co_filename)
        or not source.is_installed(frame.f_code.co_filename)
    ):
        return None
    truth = _passing_truth(frame.f_code, frame.f_lasti)
    return Compared(truth) if is_number and truth is not None else truth


class Compared(float):
    """A number of which every comparison has one truth, which is its own."""

    def __new__(cls, truth: bool) -> Compared:  # noqa: D102
        return super().__new__(cls, truth)

    def __eq__(self, other: object) -> bool:
        return bool(self)

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = float.__hash__


@functools.cache
def _passing_truth(code: CodeType, offset: int) -> bool | None:
    """Return the truth that leads around a ``raise``; None if the value at an offset decides something else."""
    instructions = list(dis.get_instructions(code))
    by_offset = {instruction.offset: index for index, instruction in enumerate(instructions)}
    index = by_offset[offset]
    if "CALL" in instructions[index].opname or instructions[index].opname in ("COMPARE_OP", "TO_BOOL"):
        # The result of bool() or item() may be compared with another value. From Python 3.13 on jumps read no truth:
        # an instruction before does.
        index += 1
        while instructions[index].opname.startswith(("LOAD_", "COPY", "COMPARE_OP", "CACHE", "TO_BOOL")):
            index += 1
    jump = instructions[index].opname
    if "IF_TRUE" not in jump and "IF_FALSE" not in jump:
        return None
    guarded = [range(entry.start, entry.end) for entry in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]

    def raises(index: int, seen: frozenset[int] = frozenset()) -> bool:
        while index not in seen and index < len(instructions):
            seen |= {index}
            name, target = instructions[index].opname, instructions[index].argval
            if name == "RAISE_VARARGS":
                return not any(instructions[index].offset in part for part in guarded)
            if name.startswith(("RETURN", "YIELD", "RERAISE")):
                return False
            if "_IF_" in name or name == "FOR_ITER":
                return raises(by_offset[target], seen) and raises(index + 1, seen)
            index = by_offset[target] if "JUMP" in name else index + 1
        return False

    after_jump, after = raises(by_offset[instructions[index].argval]), raises(index + 1)
    if after_jump == after:
        return None
    return ("IF_TRUE" in jump) != after_jump
