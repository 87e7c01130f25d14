"""The public names: the same for ``import *``, for ``dir()``, for type checkers and at run time."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import zerograph as zg


def names_for_type_checkers() -> set[str]:
    (block,) = [
        node
        for node in ast.parse(inspect.getsource(zg)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_all_lists_have_the_same_names() -> None:
    names = set(zg.__all__) - {"__version__"}
    assert names_for_type_checkers() == names
    # A submodule has no home.
    assert {*zg._HOMES, "sbp"} == names
    assert names <= set(dir(zg))
    assert all(hasattr(zg, name) for name in names)


def test_every_warning_has_the_category_of_zerograph() -> None:
    package = Path(zg.__file__).parent
    without = []
    for file in [*package.rglob("*.py"), *(package / "passes").rglob("*.py"), *(package / "runtime").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                categories = [ast.unparse(one) for one in (*node.args[1:2], *(k.value for k in node.keywords))]
                known = ("ZeroGraphWarning", "DeprecationWarning", "FutureWarning")
                without += [] if any(name in categories for name in known) else [f"{file}:{node.lineno}"]
    assert without == []
    assert issubclass(zg.ZeroGraphWarning, UserWarning)


FORMER = {
    "attention": ("ring", "context_parallel_method"),
    "batch_sbp": ((zg.sbp.split(1),), "input_sbp"),
    "recompute": ("blocks", "activation_checkpointing"),
    "sequence_parallel": (2, "context_parallel"),
    "zero_dim": ((0, 1), "shard_dims"),
}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_of_an_option_works_with_a_warning_at_the_users_line(name: str) -> None:
    value, new = FORMER[name]
    config: Any = zg.Config()

    def use() -> Any:
        setattr(config, name, value)
        assert getattr(config, name) == value
        return zg.Config(**{name: value})

    with pytest.warns(zg.ZeroGraphWarning, match=f"{name!r} is called {new!r}") as seen:
        made = use()
    assert {warning.filename for warning in seen} == {__file__}
    assert len(seen) == 3
    assert getattr(config, new) == value
    assert made == config
