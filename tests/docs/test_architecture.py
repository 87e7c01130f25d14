"""The picture of the architecture and its tables name folders and layers that exist."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.test_layers import LAYERS

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = (ROOT / "docs" / "pictures" / "architecture.svg").read_text()


def test_every_layer_is_on_the_page_and_in_the_picture() -> None:
    packages = {name.split(".")[1] for names in LAYERS[:-1] for name in names}
    drawn = set(re.findall(r"(\w+)(?:/|\.py)", PICTURE))
    assert packages - drawn == set()
    listed = set(re.findall(r"^\| .*$", PAGE, re.MULTILINE))
    assert {name for name in packages if not any(name in row for row in listed)} == set()


def test_every_folder_of_passes_is_on_the_page() -> None:
    folders = {folder.name for folder in (ROOT / "passes").iterdir() if (folder / "__init__.py").exists()}
    rows = set(re.findall(r"\]\(\.\./passes/(\w+)\)", PAGE))
    assert folders - {"rules"} - rows == set()
    assert "rules" in rows
