"""Declare the options of a dataclass: each with its default, check and documentation in one place."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Check:
    """The values that an option accepts.

    Attributes:
        accepts: returns whether a value is accepted.
        advice: what to give instead of a value that is not.
    """

    accepts: Callable[[Any], bool]
    advice: str

    def complaint(self, value: Any) -> str:
        """Return what is wrong with a value, or an empty string."""
        return "" if self.accepts(value) else self.advice


@dataclass(frozen=True)
class CheckBy(Check):
    """A check whose advice depends on the value: ``complain`` returns it, or an empty string."""

    complain: Callable[[Any], str]

    def complaint(self, value: Any) -> str:
        """Return what is wrong with the value, or an empty string."""
        return self.complain(value)


def check_by(complain: Callable[[Any], str]) -> Check:
    """Return a check from a function that returns what is wrong with a value, or an empty string."""
    return CheckBy(lambda value: not complain(value), "", complain)


def is_one_of(value: Any, *choices: str) -> bool:
    """Return whether a value is one of some strings; tensors and arrays, whose ``==`` is not a bool, are not."""
    return isinstance(value, str) and value in choices


def one_of(*choices: str, advice: str = "") -> Check:
    """Accept one of some strings."""
    listed = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    return Check(lambda value: is_one_of(value, *choices), advice or f"choose {listed}")


def is_whole_number(value: Any, low: int) -> bool:
    """Return whether a value is an int, not a bool, and at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def whole_number(low: int, unit: str, *, optional: bool = False) -> Check:
    """Accept a whole number of at least ``low``, or None if ``optional``."""
    advice = f"give a whole number of {unit}, {low} or more"
    return Check(lambda value: (optional and value is None) or is_whole_number(value, low), advice)


def whole_numbers(low: int, unit: str) -> Check:
    """Accept a whole number of at least ``low``, a tuple of ascending ones, or None."""

    def accepts(value: Any) -> bool:
        numbers = value if isinstance(value, tuple) else (value,)
        return all(is_whole_number(number, low) for number in numbers) and sorted({*numbers}) == [*numbers] != []

    advice = f"give a whole number of {unit}, {low} or more, or several in ascending order as a tuple"
    return Check(lambda value: value is None or accepts(value), advice)


def is_number(value: Any) -> bool:
    """Return whether a value is an int or float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


POSITIVE = Check(
    lambda value: value is None or (is_number(value) and 0 < value < float("inf")), "give a number above 0, or None"
)
SWITCH = Check(lambda value: isinstance(value, bool), "choose True or False")


def hashable(value: Any) -> Any:
    """Return an option's value as part of a key: a dict as its items."""
    return tuple((k, hashable(v)) for k, v in value.items()) if isinstance(value, Mapping) else value


def option(default: Any, check: Check, documentation: str) -> Any:
    """Declare an option as a dataclass field.

    Args:
        default: the option's default.
        check: the values that it accepts.
        documentation: one paragraph for the class's docstring.
    """
    return field(default=default, metadata={"check": check, "documentation": documentation})


def declared(options: type) -> list[Field[Any]]:
    """Return the options of a dataclass, in order."""
    return [option_field for option_field in fields(options) if "check" in option_field.metadata]


def document(options: type) -> None:
    """Append the section ``Attributes:`` to a dataclass's docstring, from its options."""
    lines = [
        textwrap.fill(
            f"{option_field.name}: {' '.join(option_field.metadata['documentation'].split())}",
            width=120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for option_field in declared(options)
    ]
    options.__doc__ = "\n".join([(options.__doc__ or "").rstrip(), "", "    Attributes:", *lines, "    "])
