"""Checks of values in libraries, which a traced step leaves out: ``if labels.max() >= vocabulary: raise``.

They are assertions. A step is one graph for all values, and cannot look; the error that such a check would raise
concerns the library's own use. A check in the user's own code stays an error, as every read of a value.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType
from typing import Any

from zerograph.base import source


def passing(frame: FrameType | None, *, is_number: bool) -> Any:
    """Return the value with which a library's check passes, for the read that a frame makes; None if it is no check.

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
