"""Words of an English of our own, which readers of the field do not know, do not come back."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = ("foretold", "foretell", "foretells", "whoever", "regather")
# They name these words.
EXCEPT = {"tests/test_words.py", "tests/zerograph/report_page/test_layout.py"}


def test_texts_use_the_words_of_the_field() -> None:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for folder in ("zerograph", "passes", "runtime", "tests", "benchmarks", "examples", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md", ".rst") and "results" not in path.parts
        if str(path.relative_to(ROOT)) not in EXCEPT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert not found, "\n".join(found)
