"""Pages of the documentation as programs: their blocks, and how a block is run."""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import re
import shlex
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# Of a loaded machine; quiet, a page takes some two seconds.
_PATIENCE = 600.0


@dataclass(frozen=True)
class Block:
    """The text between two fences.

    Attributes:
        section: the heading above it.
        line: of the page, that of the first line of ``text``, from 1.
    """

    language: str
    text: str
    section: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that the block is: its first line then is a comment that names it, ``# train.py``."""
        found = re.match(r"# (\w[\w.]*\.(?:py|yaml))\n", self.text)
        return found and found[1]


@dataclass(frozen=True)
class Command:
    """One command of a shell block.

    Attributes:
        variables: what it sets for itself: ``ZEROGRAPH_LOGS=memory zerograph inspect ...``.
        words: the command.
        code: what it ends with; other than 0 it is said behind it: ``# exit code 1``.
    """

    text: str
    code: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    section = ""
    language: str | None = None
    inside: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            if language is None:
                language, inside = line[3:].strip(), []
            else:
                text = "".join(f"{one}\n" for one in inside)
                yield Block(language, text, section, number - len(inside))
                language = None
        elif language is not None:
            inside.append(line)
        elif line.startswith("#"):
            section = line.lstrip("#").strip()
    assert language is None, f"{page.name} ends inside a block"


def commands(block: Block) -> Iterator[Command]:
    """The commands of a shell block, one a line, or several joined by a backslash."""
    for line in block.text.replace("\\\n", " ").splitlines():
        text, _, said = line.partition("  #")
        words = shlex.split(text, comments=True)
        if not words:
            continue
        variables = {}
        while "=" in words[0] and words[0].split("=")[0].isidentifier():
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        code = re.search(r"exit code (\d)", said)
        yield Command(shlex.join(words), int(code[1]) if code else 0, variables, words)


def run_page(page: Path, run: Sequence[Block], prelude: str = "", skipped: frozenset[str] = frozenset()) -> None:
    """Run these blocks of a page in order, in one namespace, in a folder and a process of their own, as one rank.

    Args:
        prelude: what the page takes as given.
        skipped: commands that are not run, as text.

    Raises:
        AssertionError: with the traceback of the block that raised, or the output of the command that failed.
    """
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, page, run, prelude, skipped), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_PATIENCE):
            raise AssertionError(f"{page.name} did not end within {_PATIENCE:.0f} s")
        try:
            failure = ours.recv()
        except EOFError:
            raise AssertionError(f"{page.name}: the process died") from None
    finally:
        process.kill()
        process.join()
    assert not failure, failure


def _serve(connection: Connection, *what: Any) -> None:
    torch.set_num_threads(1)
    shown = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(shown),
        ):
            _run(*what)
        connection.send("")
    except BaseException:
        connection.send(f"{shown.getvalue()}\n{traceback.format_exc()}")


def _run(page: Path, run: Sequence[Block], prelude: str, skipped: frozenset[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(prelude, "prelude", "exec"), namespace)
    for block in run:
        if block.file is not None:
            Path(block.file).write_text(block.text)
        if block.language == "python":
            # Lines count as in the page, where tracebacks and source lines of graphs find them.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec"), namespace)
        elif block.language == "bash":
            for command in commands(block):
                if command.text not in skipped:
                    _invoke(command)


def _invoke(command: Command) -> None:
    from typer.testing import CliRunner

    from zerograph.__main__ import app

    assert command.words[0] == "zerograph", f"{command.text!r} is not run: it belongs into NOT_RUN"
    found = CliRunner().invoke(app, list(command.words[1:]), env=dict(command.variables), catch_exceptions=False)
    assert found.exit_code == command.code, f"{command.text} ended with {found.exit_code}:\n{found.output}"
