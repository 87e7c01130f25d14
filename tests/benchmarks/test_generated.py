"""Pictures and result pages say what they were made from, and are told from those that show other code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks import generated
from benchmarks.generated import PAGES, PICTURES, ROOT, Generated, commit_of, digest, recorded, stale
from benchmarks.tables import page


def test_every_picture_and_page_is_listed() -> None:
    pages = {str(file.relative_to(ROOT)) for file in (ROOT / "benchmarks" / "results").glob("*.md")}
    pictures = {str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "pictures").glob("*.png")}
    assert pages == set(PAGES)
    assert pictures == set(PICTURES)


@pytest.mark.parametrize("name", [*PICTURES, *PAGES])
def test_a_picture_or_page_carries_its_commit_and_day(name: str) -> None:
    about = recorded(ROOT / name)
    assert about is not None
    commit, day, _ = about
    assert commit
    assert day.startswith("20")


@pytest.mark.parametrize("name", [*PICTURES, *PAGES])
def test_the_code_that_it_shows_is_there(name: str) -> None:
    """A pattern that matches nothing is an error: the code has moved."""
    assert digest((PICTURES | PAGES)[name].sources)


def written(root: Path, text: str) -> tuple[str, ...]:
    (root / "drawn.py").write_text(text)
    return ("drawn.py",)


def test_only_what_code_does_makes_a_picture_stale(tmp_path: Path) -> None:
    first = digest(written(tmp_path, '"""Draw."""\nimport os\n\ndef draw(x):\n    return x + 1\n'), tmp_path)
    same = '"""Draw it."""\nimport sys\n\n# A comment.\ndef draw(x):\n    """Draw x."""\n    return (x + 1)\n'
    assert digest(written(tmp_path, same), tmp_path) == first
    assert digest(written(tmp_path, "def draw(x):\n    return x + 2\n"), tmp_path) != first


def test_code_that_has_moved_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name in benchmarks/generated\.py where that code is now"):
        digest(("moved.py",), tmp_path)


def test_a_stale_picture_and_a_stale_page_are_named(tmp_path: Path) -> None:
    sources = written(tmp_path, "x = 1\n")
    about = PngInfo()
    for key, value in (("Commit", "abc1234"), ("Date", "2026-11-23"), ("Sources", digest(sources, tmp_path))):
        about.add_text(key, value)
    Image.new("RGB", (1, 1)).save(tmp_path / "picture.png", pnginfo=about)
    (tmp_path / "page.md").write_text(f"# A page\n\nCommit abc1234, 2026-11-23, sources {digest(sources, tmp_path)}.\n")
    files = {name: Generated("draw it", sources) for name in ("picture.png", "page.md")}
    assert stale(files, tmp_path) == {}
    written(tmp_path, "x = 2\n")
    assert set(stale(files, tmp_path)) == {"picture.png", "page.md"}
    assert all("abc1234, 2026-11-23, which has changed" in reason for reason in stale(files, tmp_path).values())


def test_what_carries_nothing_is_stale(tmp_path: Path) -> None:
    sources = written(tmp_path, "x = 1\n")
    (tmp_path / "page.md").write_text("# A page\n")
    files = {name: Generated("draw it", sources) for name in ("page.md", "missing.md")}
    assert stale(files, tmp_path) == {"page.md": "does not say what it was made from", "missing.md": "is missing"}


def test_a_benchmark_stamps_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page("Plans", "`python benchmarks/planner.py`, torch 2.13", "About.\n\nMore.", "| a |")
    name = "benchmarks/results/planner.md"
    (tmp_path / "planner.md").write_text(text)
    about = recorded(tmp_path / "planner.md")
    assert about is not None
    assert about[2] == digest(PAGES[name].sources)
    monkeypatch.setattr(generated, "recorded", lambda _: about)
    assert stale({name: PAGES[name]}) == {}


def test_only_files_that_no_program_writes_make_a_commit_another(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    page = tmp_path / "benchmarks" / "results" / "page.md"
    page.parent.mkdir(parents=True)
    for file in (page, tmp_path / "code.py"):
        file.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    clean = commit_of(tmp_path)
    page.write_text("2")
    assert commit_of(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path) == f"{clean}+"
