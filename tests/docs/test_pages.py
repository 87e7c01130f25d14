"""Every page of docs/ does what it says: its blocks run in order, as a reader would type them, as a job of one rank.

Blocks of Python share a namespace; one that begins with ``# train.py`` is that file too. Of shell blocks the commands
of ``zerograph`` run, and must end with the exit code that is said behind them; what does not run is listed here. The
README has two programs, which tests/front/test_launch.py runs, with and without a launcher.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zerograph as zg
import zerograph.errors
from benchmarks.readme import PAGE, PEERS, SMALL, hosts_table, models_table, peers_table, written
from tests.docs import page_setup
from tests.docs.pages import ROOT, Block, blocks, commands, run_page

PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
# They start processes, or take long; other tests do what they say.
NOT_RUN = {
    "checkpoints.md": {"torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint runs/gpt"},
    "elastic.md": {
        "zerograph launch --elastic 2:4 --max-restarts 10 train.py",
        "zerograph launch --elastic 2:4 --hosts host1,host2 --host host1 train.py",
        "zerograph launch --elastic 2:4 --hosts host1,host2 --host host2 train.py",
        "zerograph launch --elastic 2:4 --hosts host1,host2 --host host1 --shared /nfs/jobs/linear train.py",
        "torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host1:29500"
        " -m zerograph launch --elastic 2:4 train.py",
        "torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint host1:29500"
        " train.py",
    },
    "first-step.md": {"python train.py", "torchrun --nproc-per-node 2 train.py"},
    "planning.md": {
        "zerograph calibrate mine.yaml --ranks 2",
        "zerograph plan train.py:example --world-size 2,4,8 --stage 2,3 --plot curves.svg",
        "zerograph plan examples/plan_gpt.py:example --world-size 8 --stage off,1,2,3"
        " --memory memory.png --timeline timeline.png",
    },
    "reading-a-graph.md": {
        "python train.py",
        "torchrun --nproc-per-node 2 train.py",
        "zerograph diff dumps/rank0/step1 dumps/rank1/step1",
    },
}
LANGUAGES = {"python", "bash", "yaml", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path) -> None:
    run_page(page, list(blocks(page)), page_setup.PAGES.get(page.name, ""), frozenset(NOT_RUN.get(page.name, ())))


def test_the_readme_is_a_front_page_with_two_programs() -> None:
    assert [block.section for block in blocks(README) if block.language] == ["One line", "A training step"]
    assert len(README.read_text().splitlines()) <= 200


def test_the_readmes_measured_numbers_are_those_of_the_results_that_it_cites() -> None:
    """``python benchmarks/readme.py --again`` writes them."""
    text = README.read_text()
    peers, hosts = (ROOT / file for file in re.findall(r"^Source: .*?\((benchmarks/\S+)\.md\)", text, re.MULTILINE))
    tables = {"peers": peers_table(peers.with_suffix(".json")), "hosts": hosts_table(hosts.with_suffix(".json"))}
    assert written(text, tables) == text
    page = PAGE.read_text()
    assert written(page, {"peers": models_table({"mid": PEERS, "small": SMALL})}) == page


def test_a_job_that_died_in_its_first_save_starts_anew() -> None:
    """Its folder is there, a checkpoint in it is not."""
    page = ROOT / "docs" / "checkpoints.md"
    first, *others = blocks(page)
    again = [block for block in others if block.section == "Jobs that die" and block.language == "python"]
    prelude = "import pathlib\npathlib.Path('runs/linear/step-00000003/data-interrupted').mkdir(parents=True)\n"
    run_page(page, [first, *again], prelude)


def test_a_block_that_fails_says_on_which_line_of_its_page() -> None:
    with pytest.raises(AssertionError, match=r'first-step.md", line 7, in <module>\n(.*\n)*ZeroDivisionError'):
        run_page(ROOT / "docs" / "first-step.md", [Block("python", "x = 1\nx / 0\n", "", 6)])
    with pytest.raises(AssertionError, match="ended with 2"):
        run_page(README, [Block("bash", "zerograph plan --world-size none\n", "", 1)])
    with pytest.raises(AssertionError, match="belongs into NOT_RUN"):
        run_page(README, [Block("bash", "rm -rf build\n", "", 1)])


def test_every_block_is_of_a_language_that_is_known() -> None:
    """One that is called py, or nothing, would not run, and nobody would notice."""
    found = {(page.name, block.line): block.language for page in PAGES for block in blocks(page)}
    assert {where: one for where, one in found.items() if one not in LANGUAGES} == {}


def test_the_book_has_every_page_and_every_public_name() -> None:
    listed = (ROOT / "docs" / "index.rst").read_text().split()
    assert [page.stem for page in PAGES if page.stem not in listed] == []
    reference = (ROOT / "docs" / "api.rst").read_text()
    errors = {name for name in zg.__all__ if isinstance(getattr(zg, name), type) and name in vars(zerograph.errors)}
    # The module's members, all.
    assert "automodule:: zerograph.errors\n   :members:" in reference
    names = set(zg.__all__) - errors
    assert sorted(name for name in names if not re.search(rf"zerograph[\w.]*\.{name}$", reference, re.M)) == []


def test_what_is_not_run_stands_on_its_page() -> None:
    found = {
        page.name: {one.text for block in blocks(page) if block.language == "bash" for one in commands(block)}
        for page in PAGES
    }
    assert {name: texts - found[name] for name, texts in NOT_RUN.items() if texts - found[name]} == {}
