"""Values by number: what is said many times over in a report stands in it once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Interned(Generic[Item]):
    """Distinct values in the order of their first mention; calling it with one gives its number."""

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}

    def __call__(self, item: Item) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def items(self) -> list[Item]:
        return list(self._numbers)
