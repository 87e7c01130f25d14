"""Sphinx: ``make docs`` builds these pages, and the reference out of docstrings, into build/docs."""

import importlib.metadata
import re
import textwrap
from pathlib import Path

from sphinx.application import Sphinx
from typer.testing import CliRunner

from zerograph.__main__ import app as commands

ROOT = Path(__file__).parents[1]

project = "zerograph"
copyright = "the authors of zerograph"
release = importlib.metadata.version("zerograph")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
html_theme = "furo"
html_title = f"zerograph {release}"

# Titles inside pages are targets: [text](page.md#title).
myst_heading_anchors = 3
# The -- of an option is no dash.
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# Docstrings say in a section what attributes mean.
napoleon_use_ivar = True
napoleon_numpy_docstring = False


def setup(app: Sphinx) -> None:
    """Files outside of docs/ come along as they are: also those that could be pages, but are not of this book."""
    app.connect("source-read", _outside_pages_are_files)
    app.connect("source-read", _help_of_commands)


def _outside_pages_are_files(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = re.sub(r"(!?)\[([^\]]*)\]\(\.\./([^)]*)\)", _outside_link, source[0])


def _outside_link(link: re.Match[str]) -> str:
    """Return a link out of docs/ as the book has it: pictures as they are, the text of a folder's, else a file."""
    picture, text, target = link.groups()
    if picture:
        return link[0]
    # A downloaded file is opened at its beginning.
    file = target.partition("#")[0]
    return text if (ROOT / file).is_dir() else f"[{text}](path:../{file})"


def _help_of_commands(app: Sphinx, page: str, source: list[str]) -> None:
    if page != "commands":
        return
    for command in commands.registered_commands:
        assert command.callback is not None
        name = command.callback.__name__
        shown = CliRunner().invoke(commands, [name, "--help"], prog_name="zerograph", env={"COLUMNS": "84"}).stdout
        source[0] += f"\n{name}\n{'-' * len(name)}\n\n.. code-block:: text\n\n{textwrap.indent(shown, '   ')}\n"
