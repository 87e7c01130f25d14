"""Texts use the words of PyTorch, XLA and DESIGN's vocabulary: words that readers have to look up do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# predicted, a rank that, recomputed, omitted, in turn, reshard after forward, offload, guard.
WORDS = (
    *("foretold", "foretell", "foretells", "whoever", "forgone", "residence", "likeness"),
    *("regather", "regathers", "regathered", "remake", "remakes"),
    *("given up", "gives up", "make again", "makes again", "made again", "making again", "take turns", "takes turns"),
)
FOLDERS = ("zerograph", "passes", "runtime", "tests", "benchmarks", "examples", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# The first names these words, the second looks for them. The others are benchmarks whose result pages carry a digest of
# their code, texts of the pages included: a new word there would make hours of measurements stale.
EXCEPT = {
    "tests/test_words.py",
    "tests/inspection/report_page/test_layout.py",
    "benchmarks/peers.py",
    "benchmarks/recompute.py",
}


def test_texts_use_the_words_of_the_field() -> None:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    files = [ROOT / page for page in PAGES]
    files += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in files
        if path.suffix in (".py", ".md", ".rst") and "results" not in path.parts
        if str(path.relative_to(ROOT)) not in EXCEPT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert not matches, "\n".join(matches)


def test_docstrings_begin_with_a_verb_or_with_their_subject() -> None:
    pattern = re.compile(r"(What|Whether|Who|Those|Of)\b")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    matches = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for folder in ("zerograph", "passes", "runtime", "tests", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and pattern.match(text := ast.get_docstring(node) or "")
    ]
    assert not matches, "\n".join(matches)
