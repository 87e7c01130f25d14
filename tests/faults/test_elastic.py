"""An elastic job goes on when ranks die, wherever they are: each step on the same samples, with the same bits."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typer.testing import CliRunner

import zerograph as zg
from tests.faults.elastic_jobs import PLACES, STEPS, Fault, Options, Outcome, Step, run, undisturbed
from tests.faults.survival_table import Tally
from tests.faults.test_restart import environment
from zerograph.__main__ import app

ROOT = Path(__file__).parents[2]
NO_COPY = "the only copies of a part of the state"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Options], Outcome]:
    """Return the run of the same script in one process."""
    runs: dict[int, Outcome] = {}

    def of(options: Options) -> Outcome:
        if options.stage not in runs:
            outcome = undisturbed(tmp_path_factory.mktemp("undisturbed"), Options(stage=options.stage))
            assert outcome.code == 0, outcome.output
            runs[options.stage] = outcome
        return runs[options.stage]

    return of


def check_same(outcome: Outcome, expected: Outcome, *, bitwise: bool = True) -> None:
    """Check that all steps have the same samples and losses, in every try, and the state the same bits."""
    assert outcome.code == 0, outcome.output
    assert outcome.rows() == expected.rows()
    assert outcome.ends, outcome.output
    if bitwise:
        assert outcome.losses() == expected.losses(), outcome.output
        assert all(state == expected.ends[0][2] for _, _, state in outcome.ends)
        return
    wanted = {number: float.fromhex(*losses) for number, losses in expected.losses().items()}
    for number, losses in outcome.losses().items():
        assert [float.fromhex(one) for one in losses] == pytest.approx([wanted[number]] * len(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("fault", "options", "restarts", "sizes"),
    [
        (Fault(0, "step", 5), Options(), 0, [4, 2]),
        (Fault(2, "snapshot", 2, 0.001), Options(pace=0.1, late=0.0), 1, [4, 2, 4]),
        pytest.param(
            *(Fault(3, "save", 2, 0.002), Options(virtual=None, save_every=2, checkpoints=True), 0, [4, 3]),
            marks=pytest.mark.long,
        ),
    ],
    ids=["step", "snapshot, and another joins", "save"],
)
def test_a_job_that_loses_a_rank_goes_on_with_the_same_samples_and_bits(
    tmp_path: Path,
    expected: Callable[[Options], Outcome],
    tally: Callable[[str], Tally],
    fault: Fault,
    options: Options,
    restarts: int,
    sizes: list[int],
) -> None:
    row = tally(f"elastic: rank {fault.worker} is killed in a {fault.place}")
    outcome = run(tmp_path, [fault], options, restarts=restarts)
    check_same(outcome, expected(options), bitwise=options.virtual is not None)
    assert outcome.sizes() == sizes
    assert outcome.repeated() <= options.every
    row.add(True, lost_steps=outcome.repeated(), seconds=outcome.seconds)


def test_without_a_copy_and_without_a_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    outcome = run(tmp_path, [Fault(1, "step", 5), Fault(2, "step", 5)], Options())
    assert outcome.code == 1
    assert NO_COPY in outcome.output


@pytest.mark.long
def test_too_few_ranks_are_an_error(tmp_path: Path) -> None:
    outcome = run(tmp_path, [Fault(1, "step", 5)], Options(virtual=2), least=2, most=2)
    assert outcome.code == 1
    assert "1 process(es) are left, which are too few for 2 to 2 ranks" in outcome.output


def test_what_an_elastic_job_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    step, dataset = Step(Options()), TensorDataset(torch.zeros(4))
    loaders: Mapping[str, object] = {
        "loader of whole batches": DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0)),
        "prepare": zg.batches(DataLoader(dataset)),
        "yields each batch once": iter([torch.zeros(4)]),
    }
    for message, loader in loaders.items():
        with pytest.raises(zg.ConfigError, match=message):
            zg.elastic(lambda *_: None, step, loader)  # type: ignore[arg-type]
    with pytest.raises(zg.ConfigError, match="needs a folder"):
        zg.elastic(lambda *_: None, step, DataLoader(dataset), save_every=2)
    script = tmp_path / "train.py"
    script.write_text("")
    for arguments in (["--elastic", "4:2"], ["--elastic", "2:4", "--ranks", "2"], ["--elastic", "2"]):
        assert CliRunner().invoke(app, ["launch", *arguments, str(script)]).exit_code == 2


@pytest.mark.long
def test_both_copies_lost_the_job_goes_on_from_the_checkpoint(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally]
) -> None:
    options = Options(checkpoints=True, save_every=2)
    outcome = run(tmp_path, [Fault(1, "step", 6), Fault(2, "step", 6)], options)
    check_same(outcome, expected(options))
    assert "from the checkpoint" in outcome.output
    tally("elastic: a rank and its buddy are killed").add(True, lost_steps=outcome.repeated(), seconds=outcome.seconds)


@pytest.mark.long
def test_a_stopped_rank_is_lost_after_a_while(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally]
) -> None:
    outcome = run(tmp_path, [Fault(0, "step", 6, signal=signal.SIGSTOP)], Options(), patience=8.0)
    check_same(outcome, expected(Options()))
    assert "is silent for 8 seconds" in outcome.output
    tally("elastic: rank 0 is stopped").add(True, lost_steps=outcome.repeated(), seconds=outcome.seconds)


@pytest.mark.long
def test_a_job_of_processes_that_are_started_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from pathlib import Path\n"
        "import sys\n"
        "from tests.faults.elastic_jobs import Fault, Options, script\n"
        "import os\n"
        "if os.environ['ZEROGRAPH_WORKER'] == '1': Fault(1, 'step', 5).arrange(Path(sys.argv[1]))\n"
        "script(Path(sys.argv[1]), Options(virtual=2))\n"
    )
    command = [sys.executable, "-m", "zerograph", "launch", "--elastic", "1:2", str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "generation 2, 1 rank(s): on from step 3, from the snapshot in memory" in done.stderr


def drawn(number: int) -> tuple[str, list[Fault], Options, int]:
    """Return a place, faults, options, and the number of processes to start in place of lost ones."""
    draw = random.Random(number)
    place, worker = draw.choice(list(PLACES)), draw.randrange(4)
    every, saves = draw.choice([1, 3, 5]), draw.random() < 0.5 or place == "save"
    restarts = draw.choice([0, 0, 2])
    options = Options(
        virtual=draw.choice([4, 4, None]),
        stage=draw.choice([1, 2, 3]),
        every=every,
        checkpoints=saves,
        save_every=2 if saves else None,
        late=draw.choice([None, draw.uniform(0, 0.5)]) if restarts else None,
    )
    if place in ("exchange", "recovery"):
        first = Fault((worker + draw.choice([1, 2, 3])) % 4, "step", draw.randint(1, STEPS - 2))
        second = Fault(worker, place, 2, draw.choice([0.0, draw.uniform(0, 0.3)]))
        return place, [first, second], options, restarts
    most = {"compilation": 1, "step": STEPS - 2, "comparison": 50, "snapshot": STEPS // every, "save": 5}[place]
    delay = draw.choice([0.0, draw.uniform(0, 0.002), draw.uniform(0, 0.05)])
    return place, [Fault(worker, place, draw.randint(1, most), delay)], options, restarts


@pytest.mark.long
@pytest.mark.parametrize("number", range(300))
def test_a_kill_at_a_drawn_moment_changes_nothing(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally], number: int
) -> None:
    place, faults, options, restarts = drawn(number)
    outcome = run(tmp_path, faults, options, restarts=restarts)
    assert outcome.code is not None, f"it hangs\n{outcome.output}"
    saved = any((tmp_path / "checkpoints").glob("step-*/index.json"))
    if outcome.code == 1 and len(faults) == 2 and not saved and NO_COPY in outcome.output:
        # A rank and the buddy that had the copy of its part.
        tally(f"elastic: two are killed, the second in {place}: an error says that no copy is left").add(True)
        return
    if outcome.code == 1 and "after the end of training" in outcome.output:
        # What follows the loop is an ordinary job, in which others may have failed too.
        outcome = replace(outcome, code=0, ends=outcome.ends or expected(options).ends)
        place += ", after the end: exit code 1"
    check_same(outcome, expected(options), bitwise=options.virtual is not None)
    if outcome.happened == len(faults):
        tally(f"elastic: killed in {place}").add(True, lost_steps=outcome.repeated(), seconds=outcome.seconds)
