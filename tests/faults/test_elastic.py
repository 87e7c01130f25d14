"""An elastic job goes on when ranks die, wherever they are: each step on the same samples, with the same bits."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typer.testing import CliRunner

import zerograph as zg
from benchmarks.measure.hosts import make_hosts, two_hosts, unavailable
from tests.faults.elastic_jobs import (
    PATIENCE,
    STEPS,
    Fault,
    Launchers,
    Options,
    Outcome,
    Step,
    busy_address,
    read,
    run,
    runs,
    undisturbed,
)
from tests.faults.survival_table import Tally
from tests.faults.test_restart import environment
from tests.harness import sliced
from tests.scripts import run_by_torchruns_agent
from zerograph.__main__ import app
from zerograph.capture.captured import Captured
from zerograph.capture.trace import Capture
from zerograph.cli import elastic
from zerograph.cli.elastic import Supervisor, _interface
from zerograph.loops.elastic import _buddies, _interval, _Loop
from zerograph.runtime.job.elastic import Generation, JobLostError

ROOT = Path(__file__).parents[2]
# Of ranks, at drawn moments.
KILLS = int(os.environ.get("KILLS", 300))
NO_COPY = "the only copies of a part of the state"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Options], Outcome]:
    """Return the run of the same script in one process."""

    @functools.cache
    def of_kind(stage: int, loop: bool, epochs: int) -> Outcome:
        folder = tmp_path_factory.mktemp("undisturbed")
        outcome = undisturbed(folder, Options(stage=stage, loop=loop, epochs=epochs))
        assert outcome.code == 0, outcome.output
        return outcome

    def of(options: Options) -> Outcome:
        return of_kind(options.stage, options.loop, options.epochs)

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


# In the first another one joins.
@sliced(
    "fault, options, restarts, sizes",
    [
        (Fault(2, "snapshot", 2, 0.001), Options(pace=0.1, late=0.0), 1, [4, 3, 4]),
        (Fault(1, "comparison", 60), Options(loop=True), 0, [4, 3]),
    ],
    [
        (Fault(0, "step", 5), Options(), 0, [4, 3]),
        (Fault(3, "save", 2, 0.002), Options(virtual=None, save_every=2, checkpoints=True), 0, [4, 3]),
        # Those that are left have lost the step's stores, and the one that joins never had any.
        (Fault(2, "snapshot", 2, 0.001), Options(stage=0, pace=0.1, late=0.0), 1, [4, 3, 4]),
        (Fault(2, "snapshot", 2, 0.001), Options(stage=3, pace=0.1, late=0.0), 1, [4, 3, 4]),
        (Fault(1, "step", 5), Options(stage=3, loop=True, pace=0.1, late=0.0), 1, [4, 3, 4]),
    ],
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
    assert outcome.repeated() <= (options.every or STEPS)
    row.add(True, lost_steps=outcome.repeated(), seconds=outcome.seconds)


@pytest.mark.long
@pytest.mark.parametrize("loop", [False, True])
def test_eight_ranks_go_on_as_six_with_the_same_bits(tmp_path: Path, loop: bool) -> None:
    options, alone = Options(virtual=8, loop=loop), tmp_path / "undisturbed"
    alone.mkdir()
    outcome = run(tmp_path, [Fault(2, "step", 5), Fault(6, "step", 5)], options, most=8)
    check_same(outcome, undisturbed(alone, options))
    assert outcome.sizes() == [8, 6]


# The fourth group that ranks connect is the last of the first generation.
@sliced(
    "group, is_busy", [(5, False)], [(1, False), (2, False), (4, False), (6, False), (8, False), (1, True), (5, True)]
)
def test_a_rank_that_dies_while_others_connect_to_it_keeps_none_waiting(
    tmp_path: Path,
    expected: Callable[[Options], Outcome],
    tally: Callable[[str], Tally],
    group: int,
    is_busy: bool,
) -> None:
    faults = [*([Fault(1, "step", 5)] if group > 4 else []), Fault(3, "connecting", group)]
    with busy_address() as address:
        if is_busy:
            (tmp_path / "busy").write_bytes(address)
        outcome = run(tmp_path, faults, Options())
    check_same(outcome, expected(Options()))
    assert len(outcome.faults) == len(faults)
    # Gloo waits for 40.
    assert outcome.seconds_until_left < 20, outcome.output
    tally("elastic: a rank is killed while others connect to it").add(True, seconds=outcome.seconds_until_left)


# A step may take a while, so that the loss comes before the end; in the last the host's parts would else be lost.
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@sliced(
    "event, options",
    [("cut", Options(pace=0.2))],
    [
        ("comes back", Options(pace=0.5)),
        ("a rank", Options(pace=0.2, loop=True)),
        ("its launcher", Options(pace=0.2, stage=3)),
        ("its launcher ends", Options(pace=0.2, loop=True)),
        ("cut", Options(pace=0.2, loop=True)),
        ("cut", Options(pace=0.2, virtual=None)),
        ("cut while ranks connect", Options(pace=0.2)),
    ],
)
def test_a_job_that_loses_a_host_goes_on_with_the_same_samples_and_bits(
    tmp_path: Path, expected: Callable[[Options], Outcome], event: str, options: Options
) -> None:
    wanted = expected(options)
    faults = {
        "a rank": [Fault(3, "step", 5)],
        # The first group of the second generation.
        "cut while ranks connect": [Fault(2, "step", 5), Fault(3, "connecting", 5, signal=signal.SIGSTOP)],
    }.get(event, [])
    with two_hosts() as hosts, Launchers(hosts, tmp_path, options, *faults) as launchers:
        launchers.wait_for(
            lambda job: len(job.faults) == len(faults) > 0 or any(line[0] >= 5 and line[3] == 4 for line in job.lines)
        )
        if event.startswith("cut"):
            hosts[1].cut()
        elif event == "its launcher ends":
            launchers.kill(hosts[1], signal.SIGTERM)
        elif event != "a rank":
            launchers.kill(hosts[1])
        if event == "comes back":
            launchers.start_again(hosts[1])
        outcome, codes = launchers.wait()
    check_same(outcome, wanted, bitwise=options.virtual is not None)
    sizes = {"a rank": [4, 3], "comes back": [4, 2, 4]}.get(event, [4, 2])
    seen = outcome.sizes()
    assert seen == sizes or (event == "comes back" and seen == [4, 4]), outcome.output
    assert outcome.repeated() <= 3
    if event.startswith("cut"):
        # Gloo waits for 40 seconds for a rank that connects.
        assert not faults or outcome.seconds_until_left < 25, outcome.output
        assert codes[1] == 1
        assert "does not answer at 10.77.0.1:29500" in outcome.output
        assert "host 10.77.0.2 is lost: its launcher is silent for 5 seconds" in outcome.output


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_hosts_that_have_ipv6_addresses_alone_go_on_without_a_rank(
    tmp_path: Path, expected: Callable[[Options], Outcome]
) -> None:
    with two_hosts(addresses="fd77::{}") as hosts:
        (tmp_path / "hosts").write_text(f"{hosts[0].address} first\n")
        for host in hosts:
            host.run("mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts")
        names = ["first", hosts[1].address]
        with Launchers(hosts, tmp_path, Options(pace=0.2), Fault(3, "step", 5), names=names) as launchers:
            outcome, _ = launchers.wait()
    check_same(outcome, expected(Options()))
    assert outcome.sizes()[-2:] == [4, 3]


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@sliced(
    "event, options",
    [("its launcher is killed", Options(pace=0.2))],
    [
        ("comes back", Options(pace=0.5)),
        ("its wire is cut", Options(pace=0.2, loop=True)),
        ("the other wire is cut", Options(pace=0.2, stage=3)),
        ("its launcher is killed in a recovery", Options(pace=0.2, loop=True)),
    ],
)
def test_a_job_with_a_shared_folder_goes_on_without_the_first_host(
    tmp_path: Path, expected: Callable[[Options], Outcome], event: str, options: Options
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    # A rank of the first host, which is lost next.
    fault = [Fault(0, "step", 5)] if "recovery" in event else []
    with two_hosts() as hosts, Launchers(hosts, tmp_path, options, *fault, shared=shared) as launchers:
        launchers.wait_for(lambda job: any(line[0] >= 5 and line[3] == 4 for line in job.lines) or bool(job.faults))
        if "wire" in event:
            hosts["other" in event].cut()
        else:
            launchers.kill(hosts[0])
        if event == "comes back":
            launchers.start_again(hosts[0])
        outcome, codes = launchers.wait()
    check_same(replace(outcome, code=min(map(abs, codes))), expected(options))
    if "wire" in event:
        # One side goes on, whichever.
        assert sorted(codes) == [0, 1], outcome.output
        assert "was formed without this host" in outcome.output
    else:
        assert codes[1] == 0, outcome.output
        assert "host 10.77.0.1 is lost" in outcome.output
        assert "the launcher of host 10.77.0.2 leads" in outcome.output
    assert outcome.repeated() <= 3


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_the_loss_of_the_first_host_ends_the_job_and_a_rerun_goes_on(
    tmp_path: Path, expected: Callable[[Options], Outcome]
) -> None:
    options = Options(pace=0.2, checkpoints=True, save_every=2)
    with two_hosts() as hosts:
        with Launchers(hosts, tmp_path, options) as launchers:
            launchers.wait_for(lambda job: any(line[0] >= 5 and line[3] == 4 for line in job.lines))
            launchers.kill(hosts[0])
            _, codes = launchers.wait()
            assert codes[1] == 1
        with Launchers(hosts, tmp_path, options) as launchers:
            outcome, codes = launchers.wait()
    assert codes == [0, 0], outcome.output
    assert "the launcher of the first host does not answer" in outcome.output
    assert outcome.losses() == expected(options).losses()
    assert outcome.repeated() <= 2


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("number", range(KILLS // 10))
def test_a_host_that_is_lost_at_a_drawn_moment_changes_nothing(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally], number: int
) -> None:
    draw = random.Random(number)
    options = Options(stage=draw.choice([1, 2, 3]), loop=draw.random() < 0.3, every=draw.choice([1, 3]), pace=0.1)
    shared = tmp_path / "shared"
    shared.mkdir()
    with two_hosts() as hosts, Launchers(hosts, tmp_path, options, shared=shared) as launchers:
        first = draw.randint(1, STEPS - 3)
        launchers.wait_for(lambda job: any(line[0] >= first and line[3] == 4 for line in job.lines))
        time.sleep(draw.uniform(0, 0.3))
        event, lost = draw.choice(["its wire is cut", "its launcher is killed"]), draw.randrange(2)
        (hosts[lost].cut if event == "its wire is cut" else lambda: launchers.kill(hosts[lost]))()
        outcome, codes = launchers.wait()
    # If the wire is cut either side goes on.
    check_same(replace(outcome, code=min(abs(code) for code in codes)), expected(options))
    tally(f"elastic: host {lost + 1} is lost: {event}").add(True, lost_steps=outcome.repeated())


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("number", range(KILLS // 50))
def test_three_hosts_of_which_two_are_lost_one_after_the_other(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally], number: int
) -> None:
    draw = random.Random(number)
    options = Options(stage=draw.choice([1, 2, 3]), loop=draw.random() < 0.3, every=draw.choice([1, 2]), pace=0.4)
    shared = tmp_path / "shared"
    shared.mkdir()
    lost, event = draw.sample(range(3), 2), draw.choice(["their launchers are killed", "their wires are cut"])
    if number == 0:
        lost = [0, 1]
    with make_hosts(3) as hosts, Launchers(hosts, tmp_path, options, shared=shared) as launchers:
        for losses, host in enumerate(lost):
            launchers.wait_for(lambda job, after=losses: any(line[0] >= 3 and line[1] > after for line in job.lines))
            time.sleep(draw.uniform(0, 0.6))
            hosts[host].cut() if "wires" in event else launchers.kill(hosts[host])
        outcome, codes = launchers.wait()
    assert codes.count(0) == 1, outcome.output
    # Of three hosts the two go on that reach each other; of two either.
    assert codes[lost[0]] != 0, outcome.output
    check_same(replace(outcome, code=0), expected(options))
    tally(f"elastic: two of three hosts, {event}").add(True, lost_steps=outcome.repeated())


FACTOR = 1.0


class Scaled(Step):
    def build(self, x: torch.Tensor) -> torch.Tensor:
        return super().build(x) * FACTOR


@pytest.mark.parametrize(("changed", "captures"), [("never", 1), ("before", 3), ("between", 2)])
def test_a_generation_captures_again_only_after_python_values_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, captures: int
) -> None:
    run, ran = Capture.run, [0]

    def counted(self: Capture) -> Captured:
        ran[0] += 1
        return run(self)

    monkeypatch.setattr(Capture, "run", counted)
    step, x = Scaled(Options()), torch.randint(32, (8, 9))
    step(x)
    if changed == "before":
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
    step(x)
    step.save(tmp_path)
    wanted = step(x)
    step._leave_job()
    step.load(tmp_path)
    if changed == "between":
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
        wanted *= 2
    assert torch.equal(step(x), wanted)
    assert ran == [captures]


@pytest.mark.parametrize(
    ("hosts", "buddies"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aaabb", [3, 4, 3, 1, 2]),
        ("aaab", [3, 3, 3, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aaa", [1, 2, 0]),
        ("a", [0]),
    ],
)
def test_the_buddy_is_on_another_host(hosts: str, buddies: list[int]) -> None:
    assert _buddies(hosts) == buddies


@pytest.mark.parametrize(("losses", "steps"), [(1.0, 268), (4.0, 134), (0.01, 2683), (1e6, 50)])
def test_more_losses_are_worth_more_snapshots(losses: float, steps: int) -> None:
    # A snapshot of 0.1 s, steps of 0.1 s: the root of 2 x 0.1 s x 3600 s is 26.8 s; 2 % of the time is 5 s.
    assert _interval(100_000, 100_000, losses) == steps


def test_launchers_that_do_not_fit_together_say_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('nothing starts')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def launch(*arguments: str) -> str:
            place = ["--port", str(port), "--patience", "1", str(script)]
            done = CliRunner().invoke(app, ["launch", "--elastic", *arguments, *place])
            assert done.exit_code == 1, done.output
            return done.output

        assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in launch(
            "1:2", "--hosts", "127.0.0.1,b", "--host", "127.0.0.1"
        )
        # Of documentation: no machine has it.
        assert "cannot listen at 192.0.2.1" in launch("1:2", "--hosts", "192.0.2.1,b", "--host", "192.0.2.1")
    assert "does not answer at 127.0.0.1" in launch("1:2", "--hosts", "127.0.0.1,b", "--host", "b")
    assert "does not answer at no.invalid" in launch("1:2", "--hosts", "no.invalid,b", "--host", "b")
    for first in ["127.0.0.1", *(["::1"] if Path("/proc/net/if_inet6").exists() else [])]:
        terms = {"--elastic": "1:2", "--hosts": f"{first},b", "--shared": "None", "the script": str(script)}
        terms["its digest"] = "0"
        launcher = Supervisor([], 1, 2, 0, 1.0, 1, [first, "b"], first, port, terms)
        store = launcher._listen()
        assert _interface(launcher._address) == "lo"
        hosts = ["--hosts", f"[{first}],b", "--host", "b"]
        assert f"--elastic is 1:3 on b, and 1:2 on {first}" in launch("1:3", *hosts)
        assert "its digest is" in launch("1:2", *hosts)
        del store, launcher


def test_a_minority_waits_anew_in_each_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, now, store = "abcdefg", 1.0, dist.HashStore()
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: now))
    launcher = Supervisor([], 1, 7, 0, 5.0, 1, hosts, "a")
    launcher._store, launcher._claims = store, elastic._Claims(tmp_path)
    launcher._generation = elastic._Generation(1, range(7), 7, hosts)
    for generation, left in ((1, "abc"), (2, "a")):
        launcher._workers = {hosts.index(host): elastic._Worker(host) for host in left}
        launcher._launchers = {hosts.index(host): elastic._Launcher(now, host=host) for host in left[1:]}
        for number in launcher._workers:
            store.set(f"want/{number}", f"[{generation}, null]")
        for seconds, formed in ((0, generation), (14, generation), (2, generation + 1)):
            now += seconds
            launcher._form()
            assert launcher._generation.number == formed


def test_without_a_copy_and_without_a_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    outcome = run(tmp_path, [Fault(1, "step", 5), Fault(2, "step", 5)], Options())
    assert outcome.code == 1
    assert NO_COPY in outcome.output


@pytest.mark.long
def test_too_few_ranks_are_an_error(tmp_path: Path) -> None:
    outcome = run(tmp_path, [Fault(1, "step", 5)], Options(virtual=2), least=2, most=2)
    assert outcome.code == 1
    assert "1 process(es) are left, which are too few for 2 to 2 ranks" in outcome.output


@pytest.mark.parametrize(("after_loss", "failures"), [(True, 9), (False, 4)])
def test_losses_that_the_launcher_sees_late_are_no_false_alarms(
    monkeypatch: pytest.MonkeyPatch, after_loss: bool, failures: int
) -> None:
    tries = [0]

    def fails(_: object) -> None:
        tries[0] += 1
        raise zg.CommunicationError("lost the others") if tries[0] < 9 else JobLostError("the end of the test")

    worker = SimpleNamespace(is_broken=lambda wait: False, generation=Generation(2, (0,), 1, (), after_loss))
    monkeypatch.setattr("zerograph.runtime.job.elastic.worker", lambda: worker)
    monkeypatch.setattr(_Loop, "_enter", fails)
    monkeypatch.setattr(_Loop, "_leave", lambda *_: None)
    step, loader = Step(Options()), DataLoader(TensorDataset(torch.zeros(4)))
    with pytest.raises(zg.CommunicationError):
        zg.elastic(lambda *_: None, step, loader)
    assert tries == [failures]


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
    with pytest.raises(zg.ConfigError, match="losses_per_hour"):
        zg.elastic(lambda *_: None, step, DataLoader(dataset), losses_per_hour=0.0)
    with pytest.raises(zg.ConfigError, match="needs a folder"):
        zg.elastic(lambda *_: None, step, DataLoader(dataset), save_every=2)
    with pytest.raises(zg.ConfigError, match=r"that zg.prepare\(\) has not prepared"):
        zg.elastic(lambda *_: None, nn.Linear(4, 4), DataLoader(dataset))
    script = tmp_path / "train.py"
    script.write_text("")
    for arguments in (
        ["--elastic", "4:2"],
        ["--elastic", "2:4", "--ranks", "2"],
        ["--elastic", "2"],
        ["--elastic", "2:4", "--hosts", "a,b"],
        ["--elastic", "2:4", "--shared", str(tmp_path)],
        ["--elastic", "2:4", "--hosts", "a,b", "--host", "a", "--shared", str(tmp_path / "none")],
    ):
        assert CliRunner().invoke(app, ["launch", *arguments, str(script)]).exit_code == 2


def test_what_a_snapshot_of_a_loop_does_not_hold_is_refused() -> None:
    dataset = TensorDataset(torch.ones(4, 4))
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = zg.prepare(plain, optimizer)

    def keeps_gradients(_: int, batch: list[torch.Tensor]) -> None:
        model(*batch).sum().backward()
        optimizer.step()

    with pytest.raises(zg.ConfigError, match="pass the prepared module"):
        zg.elastic(keeps_gradients, zg.step_of(optimizer), DataLoader(dataset))
    with pytest.raises(zg.ConfigError, match="needs the scheduler too"):
        zg.elastic(keeps_gradients, model, DataLoader(dataset))
    model, optimizer, _ = zg.prepare(model, optimizer, scheduler)
    with pytest.raises(zg.ConfigError, match="gradients are left after train_step"):
        zg.elastic(keeps_gradients, model, DataLoader(dataset))
    scaler = torch.amp.GradScaler("cpu")

    def scales(_: int, batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        scaler.scale(model(*batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with pytest.raises(zg.ConfigError, match="GradScaler"):
        zg.elastic(scales, model, DataLoader(dataset))


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


# A rank dies in the fifth step of the first start.
KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from tests.faults.elastic_jobs import Fault, Options, script

folder, saves = Path(sys.argv[1]), int(sys.argv[2])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    Fault(1, "step", 5).arrange(folder)
script(folder, Options(checkpoints=bool(saves), save_every=saves or None))
"""


@sliced("saves, again", [(2, 0)], [(0, 4)])
def test_under_torchrun_all_ranks_start_anew_and_go_on_from_the_checkpoint(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally], saves: int, again: int
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "job"
    script.write_text(KILLED)
    folder.mkdir()
    printed = run_by_torchruns_agent(tmp_path / "logs", [str(script), str(folder), str(saves)], restarts=1)
    outcome = read(folder, 0)
    check_same(outcome, expected(Options()))
    assert outcome.repeated() == again
    where = "on from step 4, from the checkpoint" if saves else "(1 of 1), and nothing is saved: on from step 0"
    assert where in printed["stderr"]
    tally("elastic: torchrun starts all ranks anew").add(True, lost_steps=outcome.repeated(), seconds=outcome.seconds)


@pytest.mark.long
def test_torchrun_with_fewer_hosts_goes_on_from_the_checkpoint(
    tmp_path: Path, expected: Callable[[Options], Outcome]
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "job"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.faults.elastic_jobs import Options, script\n"
        "Path(sys.argv[1], f'{os.getpid()} of {os.getppid()}').touch()\n"
        "script(Path(sys.argv[1]), Options(checkpoints=True, save_every=2, pace=0.3))\n"
    )
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
    patience = "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
    size = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", patience]
    command = [sys.executable, "-m", "torch.distributed.run", *size, *meeting, "--local-addr", "127.0.0.1"]
    hosts = []
    try:
        for name in ("first", "second"):
            with open(tmp_path / name, "w") as output:
                started = [*command, str(script), str(folder)]
                hosts.append(subprocess.Popen(started, env=environment(), stderr=output, start_new_session=True))
            # The first hosts the store.
            time.sleep(1.0)
        while not any(line[0] >= 5 for line in read(folder, 0).lines):
            time.sleep(0.1)
        # The host goes, with its agent and its ranks.
        hosts[1].kill()
        for file in folder.glob(f"* of {hosts[1].pid}"):
            os.kill(int(file.name.split()[0]), signal.SIGKILL)
        code = hosts[0].wait(PATIENCE)
    finally:
        for host in hosts:
            host.kill()
    printed = (tmp_path / "first").read_text()
    assert code == 0, printed
    outcome = read(folder, 0)
    check_same(outcome, expected(Options()))
    assert outcome.sizes() == [2, 1]
    assert "1 rank(s): on from step" in printed


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_launchers_that_torchrun_has_started_keep_the_ranks_that_are_left(
    tmp_path: Path, expected: Callable[[Options], Outcome]
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "job"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.faults.elastic_jobs import Options, script\n"
        "script(Path(sys.argv[1]), Options(pace=0.5))\n"
    )
    folder.mkdir()
    with two_hosts() as hosts:
        size = ["--nnodes", "1:2", "--nproc-per-node", "1"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29500", "--rdzv-id", "elastic"]
        launcher = ["-m", "zerograph", "launch", "--elastic", "1:4", "--patience", "30", str(script), str(folder)]
        agents = []
        for host in hosts:
            command = [*host.enter(), sys.executable, "-m", "torch.distributed.run", *size, *meeting]
            with open(tmp_path / host.name, "w") as output:
                # These hosts have no names.
                who = ["--rdzv-conf", f"is_host={host is hosts[0]}", "--local-addr", host.address]
                started = [*command, *who, *launcher]
                agents.append(subprocess.Popen(started, env=environment(), stderr=output))
        # Eight processes begin with Python and torch.
        limit = time.monotonic() + 3 * PATIENCE
        while not any(line[0] >= 5 and line[3] == 4 for line in read(folder, 0).lines):
            assert time.monotonic() < limit, (tmp_path / "host0").read_text()
            time.sleep(0.1)
        # With its agent and its launcher.
        hosts[1].signal(signal.SIGKILL)
        # Its agent waits five minutes for the lost one.
        while len([*folder.glob("end *")]) < 2:
            assert agents[0].poll() is None, (tmp_path / "host0").read_text()
            assert time.monotonic() < limit + PATIENCE, (tmp_path / "host0").read_text()
            time.sleep(0.1)
    for agent in agents:
        agent.wait()
    printed = (tmp_path / "host0").read_text()
    outcome = read(folder, 0)
    check_same(outcome, expected(Options()))
    assert outcome.sizes() == [4, 2], printed
    # No process was started again.
    assert len([*folder.glob("*.jsonl")]) == 4


def soaked(kills: int, number: int, folder: Path) -> Options:
    """Return the options of a job in which ranks are killed again and again."""
    draw = random.Random(number)
    # Torch keeps its last 2,000 collectives, some kilobyte each, of groups that are gone too.
    variables = {"TMPDIR": str(folder), "TORCH_FR_BUFFER_SIZE": "0"}
    if number % 4 == 2:
        variables["ZEROGRAPH_WIRE"] = "sockets"
    if number % 3 == 2:
        variables |= {"ZEROGRAPH_CACHE": str(folder.parent / "cache"), "ZEROGRAPH_CACHE_STEPS": "1GiB"}
    return Options(
        stage=draw.choice([1, 2, 3]),
        loop=number % 2 == 1,
        every=draw.choice([1, 3]),
        checkpoints=True,
        save_every=4,
        pace=0.05,
        epochs=kills * 3 // 2,
        kills=kills,
        seed=number,
        spared=draw.choice([3, 3, -1]),
        variables=variables,
    )


def check_no_growth(folder: Path, *, is_long: bool) -> None:
    """Check that from kill to kill survivors and the launcher use no more memory, files, threads and store keys."""
    for file in folder.glob("usage of *"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if file.name.endswith("the launcher"):
            # Some for the job, and what processes that wait have asked.
            assert max(keys for *_, keys, _ in lines) <= 10
            files = [files + own for _, files, _, own, *_ in lines]
            # Connections of workers that are on their way count too.
            assert max(files[len(files) // 2 :]) <= max(files[: len(files) // 2 + 1]) + 8, lines
        else:
            # Others of a generation of as many ranks, after the first, in which everything happens once.
            lines = [line for line in lines[1:] if line[3] == 4]
            assert all(mailboxes <= 3 for *_, mailboxes, _ in lines), lines
            # What a broken step has held may stay until the next recovery. In some generations all survivors have
            # fewer: a group connects when it is first needed.
            files = [files for _, files, *_ in lines]
            names = file.with_name(file.name.replace("usage", "files"))
            assert len(lines) < 4 or min(files[-3:]) <= max(files[: len(files) // 2]), (lines, names.read_text())
        assert not lines or lines[-1][2] <= lines[0][2], lines
        if is_long and len(lines) > 12:
            # What lives does not grow; the free heap, in pieces, does by some 0.05 MB for each generation.
            assert lines[-1][0] - lines[6][0] < 2**17 * (lines[-1][-1] - lines[6][-1]), lines


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux shows in /proc")
@pytest.mark.long
@pytest.mark.parametrize(("kills", "number"), [(4, 0), *((40, number) for number in range(1, KILLS // 40 + 1))])
def test_kills_again_and_again_change_nothing(
    tmp_path: Path, expected: Callable[[Options], Outcome], tally: Callable[[str], Tally], kills: int, number: int
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    options = soaked(kills, number, temporary)
    outcome = run(tmp_path, [], options, least=2, restarts=2 * kills + 4, patience=8.0)
    assert outcome.code is not None, f"it hangs\n{outcome.output}"
    check_same(outcome, expected(options))
    for moment, place in outcome.faults:
        tally(f"elastic, again and again: killed in {place}").add(True, seconds=outcome.seconds_after(moment))
    assert len(outcome.faults) >= kills // 2
    check_no_growth(tmp_path, is_long=kills >= 40)
    assert not any(runs(int(file.read_text())) for file in tmp_path.glob("process of *"))
    assert not any(temporary.iterdir())
