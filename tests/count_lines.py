"""Count code lines, without blanks, comments and docstrings, by folder: ``python -m tests.count_lines [REVISION]``.

With a revision of git, the differences from it are printed too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("zerograph", "passes", "runtime", "tests", "benchmarks")
OUTSIDE_OF_PACKAGE = ("tests", "benchmarks")

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """Return the number of lines that have code."""
    lines = text.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and '"""' in lines[node.lineno - 1]:
            # Blank lines and comments in texts are code.
            code.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code - docstrings)


def by_folder(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Return code lines by folder of the package, or by folder of the repository outside of it.

    Args:
        files: path from the root, and text of each file.
    """
    lines: Counter[str] = Counter()
    for path, text in files:
        folder, *inside = path.split("/")
        lines[f"zerograph/{inside[0]}" if folder == "zerograph" and len(inside) > 1 else folder] += code_lines(text)
    return lines


def of_checkout() -> Counter[str]:
    """Count the files of this checkout."""
    # rglob() does not follow the links zerograph/passes and zerograph/runtime.
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return by_folder((path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def of_revision(revision: str) -> Counter[str]:
    """Count the files of a revision."""
    paths = _git("ls-tree", "-r", "--name-only", revision, *FOLDERS).splitlines()
    return by_folder((path, _git("show", f"{revision}:{path}")) for path in paths if path.endswith(".py"))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(revision: str | None = None) -> None:
    """Print a table."""
    now = of_checkout()
    before = now if revision is None else of_revision(revision)
    rows = [(folder, now[folder], before[folder]) for folder in sorted({*now, *before})]
    package = [row for row in rows if row[0] not in OUTSIDE_OF_PACKAGE]
    rows.append(("package", sum(row[1] for row in package), sum(row[2] for row in package)))
    for folder, lines, old in rows:
        print(f"{folder:24}{lines:8,}" + ("" if revision is None else f"{lines - old:+8,}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
