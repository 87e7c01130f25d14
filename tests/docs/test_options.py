"""docs/options.md has the options as the code declares them."""

from __future__ import annotations

import runpy

from tests.docs.pages import ROOT
from zerograph.config import OPTIONS

TABLE = runpy.run_path(str(ROOT / "docs" / "options_table.py"))


def test_the_page_of_options_is_current() -> None:
    """``python docs/options_table.py`` writes it."""
    text = (ROOT / "docs" / "options.md").read_text()
    assert TABLE["page"](text) == text


def test_every_option_is_in_one_table() -> None:
    names = [name for _, _, names in TABLE["GROUPS"] for name in names.split()]
    assert sorted(names) == sorted(OPTIONS)
