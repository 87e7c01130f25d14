"""Pictures and result pages that programs write: what each was made from, and which are stale.

python benchmarks/generated.py          # says which are stale and how to make them again; exit code 1 if a picture is
python benchmarks/generated.py --make   # makes stale pictures again, in some minutes; report.png needs chromium

Each carries the commit and the day that it was made on, and a digest of the code that it shows: a page in its text, a
picture in its metadata. Comments, docstrings, imports and layout of Python do not count. A result page is of parameters
and versions: its digest has the pinned versions of the packages that it measures, and leaves out wording, which is text
with a space in it and the names of variables. Result pages take quiet machines and up to hours: those that are stale
are said, and never made here.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from zerograph.base import source  # noqa: E402

_STAMP = re.compile(r"^Commit (\S+), (\d{4}-\d\d-\d\d), (?:sources (\w{12})|sources not recorded)\.$", re.MULTILINE)
_GPT = "examples/plan_gpt.py"
_TIMES = ("zerograph/planner/timeline.py", "zerograph/planner/costs.py", "zerograph/planner/machines/*.yaml")


@dataclass(frozen=True)
class Generated:
    """A file that a program writes.

    Attributes:
        command: makes it again.
        sources: patterns of the files whose code it shows, from the top of the repository.
        versions: packages whose version in constraints.txt it is of.
        wording: the file shows the texts of that code.
    """

    command: str
    sources: tuple[str, ...]
    versions: tuple[str, ...] = ()
    wording: bool = False


def _page(
    name: str, *sources: str, command: str | None = None, versions: tuple[str, ...] = ("torch",)
) -> tuple[str, Generated]:
    script = f"benchmarks/{name}.py"
    return f"benchmarks/results/{name}.md", Generated(command or f"python {script}", (script, *sources), versions)


_PEERS = ("benchmarks/peers.py", "benchmarks/contenders/*.py", "benchmarks/measure/*.py")
_PACKAGES = ("torch", "deepspeed", "fairscale")

PICTURES: Mapping[str, Generated] = {
    "docs/pictures/report.png": Generated(
        "python benchmarks/generated.py --make report.png",
        (
            "zerograph/inspection/report/*.py",
            "zerograph/inspection/report/assets/*.[jch]*",
            "zerograph/base/palette.py",
            "passes/pipeline.py",
            *_TIMES,
            _GPT,
        ),
        wording=True,
    ),
    "docs/pictures/memory.png": Generated(
        "python benchmarks/generated.py --make memory.png",
        ("zerograph/planner/pictures.py", "zerograph/base/palette.py", "zerograph/ir/memory.py", _GPT),
        wording=True,
    ),
    "docs/pictures/timeline.png": Generated(
        "python benchmarks/generated.py --make timeline.png",
        ("zerograph/planner/pictures.py", "zerograph/base/palette.py", *_TIMES, _GPT),
        wording=True,
    ),
}
PAGES: Mapping[str, Generated] = dict(
    (
        _page("planner", "zerograph/planner/front/calibrate.py", "zerograph/planner/operators.py", *_TIMES[:2]),
        _page("any_batch", "zerograph/compiler/dimensions.py", "zerograph/ir/sizes.py"),
        _page("compile_time", "passes/pipeline.py"),
        _page("equivalence"),
        _page("first_step", "zerograph/artifact/*.py", "zerograph/compiler/step_cache.py"),
        _page("hosts", *_PEERS[1:], command="python benchmarks/hosts.py"),
        _page("gpu", "benchmarks/simulated/*.py", command="make bench-gpu", versions=()),
        _page("generate", "zerograph/state/generate.py"),
        _page("muon", "zerograph/ir/buckets.py"),
        _page("features", command="make bench-memory"),
        _page("memory", "zerograph/ir/memory.py"),
        _page("offload"),
        _page("overhead", "runtime/job/channel.py", "runtime/reduce_overhead.py"),
        _page("recompute"),
        _page(
            "scripts",
            *("zerograph/loops/*.py", "zerograph/integrations/*.py", "benchmarks/front_doors/*.py"),
            command="python -m benchmarks.scripts",
        ),
        _page("sequences", "zerograph/ops/attention.py", "passes/placement/attention.py"),
        _page("thin", "zerograph/ops/blocks.py"),
        _page("update"),
        _page("wire"),
    )
) | {f"benchmarks/results/peers-{size}.md": Generated("make bench", _PEERS, _PACKAGES) for size in ("mid", "small")}


def digest(made: Generated, root: Path = ROOT) -> str:
    """Return a digest of the code in all files that match the patterns, and of the versions.

    Raises:
        ValueError: a pattern matches no file.
    """
    known = hashlib.sha256()
    for pattern in made.sources:
        files = sorted(file for file in root.glob(pattern) if file.is_file())
        if not files:
            raise ValueError(f"no file matches {pattern!r}: name in benchmarks/generated.py where that code is now")
        for file in files:
            content = file.read_bytes()
            known.update(code(content.decode(), made.wording).encode() if file.suffix == ".py" else content)
    for package in made.versions:
        pins = (root / "constraints.txt").read_text().splitlines()
        known.update("".join(pin for pin in pins if pin.startswith(f"{package}==")).encode())
    return known.hexdigest()[:12]


def code(text: str, wording: bool = True) -> str:
    """Return what a module of Python does, as text: without comments, docstrings, imports and layout.

    Args:
        wording: with texts that have a space in them, and with the names of variables.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        kept = [one for one in body if not isinstance(one, ast.Import | ast.ImportFrom)]
        if kept and isinstance(kept[0], ast.Expr) and isinstance(kept[0].value, ast.Constant):
            kept = kept[1:]
        node.body = kept  # type: ignore[attr-defined]
    if not wording:
        _drop_wording(tree)
    return _dump(tree)


def _dump(node: object) -> str:
    """Return a tree as text that does not depend on Python's version: later ones have more fields, which are empty."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [f"{name}={_dump(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
    return f"{type(node).__name__}({', '.join(parts)})"


def _drop_wording(tree: ast.Module) -> None:
    """Empty texts that have a space in them, and number the variables in order."""
    numbers: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            numbers.setdefault(node.arg, str(len(numbers)))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            numbers.setdefault(node.id, str(len(numbers)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = ""
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            node.arg = numbers.get(node.arg, node.arg)
        elif isinstance(node, ast.Name):
            node.id = numbers.get(node.id, node.id)


def commit_of(root: Path = ROOT) -> str:
    """Return the commit, with ``+`` if files differ that no program writes; empty without a repository."""
    named = source.commit(root)
    if not named.endswith("+"):
        return named
    others = ("--", ".", ":!benchmarks/results", ":!docs/pictures")
    differs = subprocess.run(["git", "-C", root, "diff", "--quiet", "HEAD", *others], check=False).returncode
    return named if differs else named.removesuffix("+")


def stamp(page: str) -> str:
    """Return the line of a result page that says what it was made from.

    Args:
        page: its path, from the top of the repository.
    """
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"Commit {commit_of() or 'unknown'}, {day}, sources {digest(PAGES[page])}."


def recorded(file: Path) -> tuple[str, str, str] | None:
    """Return the commit, day and digest that a file carries; None if it carries none, an empty digest if unknown."""
    if file.suffix == ".png":
        from PIL import Image

        with Image.open(file) as image:
            text = image.info
        return (text["Commit"], text["Date"], text["Sources"]) if "Sources" in text else None
    match = _STAMP.search(file.read_text())
    return None if match is None else (match[1], match[2], match[3] or "")


def stale(files: Mapping[str, Generated], root: Path = ROOT) -> dict[str, str]:
    """Return why each stale file is stale."""
    reasons = {}
    for name, made in files.items():
        about = recorded(root / name) if (root / name).exists() else None
        if about is None:
            reasons[name] = "does not say what it was made from" if (root / name).exists() else "is missing"
        elif not about[2]:
            reasons[name] = f"is of {about[0]}, {about[1]}: which code it shows was not recorded"
        elif about[2] != digest(made, root):
            reasons[name] = f"shows the code of {about[0]}, {about[1]}, which has changed"
    return reasons


def _report(folder: Path) -> None:
    """Draw the page of a GPT at stage 3 as a browser shows it."""
    from selenium import webdriver

    page = folder / "step.html"
    command = ("inspect", f"{_GPT}:example", "--world-size", "8", "--stage", "3", "--machine", "h100")
    _zerograph(*command, "--report", str(page))
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        screen = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(page.as_uri())
        began = time.monotonic()
        while not browser.execute_script("return document.documentElement.dataset.ready !== undefined"):
            if time.monotonic() - began > 120:
                raise TimeoutError("the report was not drawn in two minutes")
            time.sleep(0.1)
        time.sleep(0.5)
        browser.save_screenshot(str(folder / "report.png"))
    finally:
        browser.quit()


def _plans(folder: Path) -> None:
    """Draw memory and time of a GPT, stage by stage."""
    pictures = ("--memory", str(folder / "memory.png"), "--timeline", str(folder / "timeline.png"))
    _zerograph("plan", f"{_GPT}:example", "--world-size", "8", "--stage", "off,1,2,3", *pictures)


def _zerograph(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "zerograph", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


_DRAWN: Mapping[Callable[[Path], None], tuple[str, ...]] = {
    _report: ("docs/pictures/report.png",),
    _plans: ("docs/pictures/memory.png", "docs/pictures/timeline.png"),
}


def make(names: set[str]) -> None:
    """Draw pictures again, and write into them what they were made from."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    commit, day = commit_of(), datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for draw, files in _DRAWN.items():
        if not names & set(files):
            continue
        with tempfile.TemporaryDirectory() as folder:
            draw(Path(folder))
            for name in files:
                about = PngInfo()
                for key, value in (("Commit", commit), ("Date", day), ("Sources", digest(PICTURES[name]))):
                    about.add_text(key, value)
                with Image.open(Path(folder) / Path(name).name) as image:
                    image.convert("RGB").save(ROOT / name, pnginfo=about, optimize=True)
                print(f"made {name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", nargs="*", metavar="PICTURE", help="make these again; those that are stale if none")
    asked = parser.parse_args().make
    if asked is not None:
        known = {Path(name).name: name for name in PICTURES}
        if unknown := set(asked) - set(known):
            parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        make({known[name] for name in asked} or set(stale(PICTURES)))
    pictures, pages = stale(PICTURES), stale(PAGES)
    for name, reason in (pictures | pages).items():
        print(f"stale: {name} {reason}; {(PICTURES | PAGES)[name].command}")
    return 1 if pictures else 0


if __name__ == "__main__":
    sys.exit(main())
