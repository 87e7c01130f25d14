"""Pictures and result pages say what they were made from, and are told from those that show other code."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks import generated
from benchmarks.generated import PAGES, PICTURES, ROOT, Generated, code, commit_of, digest, recorded, stale
from benchmarks.tables import page


def test_every_picture_and_page_is_listed() -> None:
    pages = {str(file.relative_to(ROOT)) for file in (ROOT / "benchmarks" / "results").glob("*.md")}
    pictures = {str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "pictures").glob("*.png")}
    assert pages == set(PAGES)
    assert pictures == set(PICTURES)


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


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
    assert digest((PICTURES | PAGES)[name])


def written(root: Path, text: str, wording: bool = True) -> Generated:
    (root / "drawn.py").write_text(text)
    return Generated("draw it", ("drawn.py",), wording=wording)


def test_only_what_code_does_makes_a_picture_stale(tmp_path: Path) -> None:
    first = digest(written(tmp_path, '"""Draw."""\nimport os\n\ndef draw(x):\n    return x + 1\n'), tmp_path)
    same = '"""Draw it."""\nimport sys\n\n# A comment.\ndef draw(x):\n    """Draw x."""\n    return (x + 1)\n'
    assert digest(written(tmp_path, same), tmp_path) == first
    assert digest(written(tmp_path, "def draw(x):\n    return x + 2\n"), tmp_path) != first


def test_wording_makes_a_picture_stale_and_no_result_page(tmp_path: Path) -> None:
    one = "def measure(steps=3):\n    found = steps + 1\n    print('steps in all:', found)\n"
    other = "def measure(count=3):\n    seconds = count + 1\n    print('number of steps:', seconds)\n"
    for wording in (True, False):
        digests = {digest(written(tmp_path, text, wording), tmp_path) for text in (one, other)}
        assert len(digests) == 1 + wording


@pytest.mark.parametrize("other", ["steps=4", "steps=3, model='mid'"])
def test_parameters_make_a_result_page_stale(tmp_path: Path, other: str) -> None:
    first = digest(written(tmp_path, "measure(steps=3)\n", wording=False), tmp_path)
    assert digest(written(tmp_path, f"measure({other})\n", wording=False), tmp_path) != first


def test_another_version_makes_a_result_page_stale(tmp_path: Path) -> None:
    sources = written(tmp_path, "measure()\n").sources
    digests = set()
    for version in ("2.13.0", "2.14.0"):
        (tmp_path / "constraints.txt").write_text(f"torch=={version}\nruff=={version}\n")
        digests.add((digest(Generated("", sources, ("torch",)), tmp_path), digest(Generated("", sources), tmp_path)))
    assert [len(set(each)) for each in zip(*digests, strict=True)] == [2, 1]


def test_a_digest_does_not_depend_on_pythons_version() -> None:
    """From 3.12 on ``ast`` gives functions a list of type parameters, which 3.13 does not show if it is empty."""
    function = "FunctionDef(name='f', args=arguments(), body=[Return(value=Constant(value=1))])"
    assert code("def f():\n    return 1\n") == f"Module(body=[{function}])"


def test_code_that_has_moved_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name in benchmarks/generated\.py where that code is now"):
        digest(Generated("", ("moved.py",)), tmp_path)


def test_a_stale_picture_and_a_stale_page_are_named(tmp_path: Path) -> None:
    made = written(tmp_path, "x = 1\n")
    about = PngInfo()
    for key, value in (("Commit", "abc1234"), ("Date", "2026-11-23"), ("Sources", digest(made, tmp_path))):
        about.add_text(key, value)
    Image.new("RGB", (1, 1)).save(tmp_path / "picture.png", pnginfo=about)
    (tmp_path / "page.md").write_text(f"# A page\n\nCommit abc1234, 2026-11-23, sources {digest(made, tmp_path)}.\n")
    files = dict.fromkeys(("picture.png", "page.md"), made)
    assert stale(files, tmp_path) == {}
    written(tmp_path, "x = 2\n")
    assert set(stale(files, tmp_path)) == {"picture.png", "page.md"}
    assert all("abc1234, 2026-11-23, which has changed" in reason for reason in stale(files, tmp_path).values())


def test_what_carries_nothing_is_stale(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A page\n")
    files = dict.fromkeys(("page.md", "missing.md"), written(tmp_path, "x = 1\n"))
    assert stale(files, tmp_path) == {"page.md": "does not say what it was made from", "missing.md": "is missing"}


def test_a_benchmark_stamps_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page("Plans", "`python benchmarks/planner.py`, torch 2.13", "About.\n\nMore.", "| a |")
    name = "benchmarks/results/planner.md"
    (tmp_path / "planner.md").write_text(text)
    about = recorded(tmp_path / "planner.md")
    assert about is not None
    assert about[2] == digest(PAGES[name])
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
