"""Every link of the pages leads to a file that exists, and to a heading that the file has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.generated import recorded
from tests.docs.pages import ROOT

PAGES = sorted(
    file
    for pattern in ("*.md", "docs/*.md", "runtime/**/*.md", "benchmarks/results/*.md")
    for file in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the book make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    missing = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.rst")), ids=lambda page: page.name)
def test_what_a_page_of_sphinx_names_exists(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"^\.\. (?:image|literalinclude):: (\S+)", text, re.MULTILINE)
    listed = [
        names.split() for names in re.findall(r"^\.\. toctree::\n(?:   :.*\n)*\n((?:   \S+\n)+)", text, re.MULTILINE)
    ]
    pages = {*re.findall(r":doc:`(?:[^`<]*<)?([\w-]+)>?`", text), *(name for names in listed for name in names)}
    known = {file.stem for pattern in ("*.md", "*.rst") for file in page.parent.glob(pattern)}
    assert [file for file in files if not (page.parent / file).exists()] == []
    assert pages - known == set()
    assert pages or page.stem != "index"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_commit_that_a_page_cites_is_that_of_the_results(page: Path) -> None:
    for name, commit in re.findall(r"\]\((\S*results/\S+\.md)\), commit (\w+)", page.read_text()):
        about = recorded((page.parent / name).resolve())
        assert about is not None
        assert commit == about[0], name


def test_links_out_of_the_book_are_files_without_their_headings() -> None:
    text = (ROOT / "docs" / "conf.py").read_text()
    function = text[text.index("def _outside_link") : text.index("def _help_of_commands")]
    scope: dict[str, object] = {"re": re, "ROOT": ROOT}
    exec(function, scope)
    outside = scope["_outside_link"]
    assert callable(outside)
    shown = re.sub(r"(!?)\[([^\]]*)\]\(\.\./([^)]*)\)", outside, "[here](../runtime/wire/README.md#several-ranks)")
    assert shown == "[here](path:../runtime/wire/README.md)"
