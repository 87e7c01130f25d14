"""Names that OneFlow shares with torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def names_of(module: ModuleType) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module of OneFlow's whose other names are those of a module of torch's."""

    def get(name: str) -> Any:
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither zerograph.compat.oneflow nor {module.__name__} has {name!r}; docs/oneflow.md lists the "
                "supported names"
            ) from None

    return get
