"""A rank that is lost or interrupted while ranks of one host compare notes and sum small tensors in mailboxes."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.faults.lost_ranks import note_time, noted_time, run
from tests.faults.survival_table import Tally
from tests.harness import sliced, told
from tests.models import TrainStep, adam_step, adamw, batches, make, part
from zerograph.runtime.job.channel import Channel
from zerograph.runtime.peer_memory.peer import Peer
from zerograph.runtime.wire import collectives

# Seconds until all know, for a machine that is busy with other tests; the timeout is longer, but for a stopped rank.
SOON, TIMEOUT, SHORT_TIMEOUT = 15.0, 120.0, 6.0

# What the lost rank is about to call: its note is not sent or sent, its summand not announced or announced.
PLACES: dict[str, tuple[Any, str]] = {
    "before its note": (Peer, "send_note"),
    "after its note": (Peer, "receive_note"),
    "before its summand": (collectives._SumOfAll, "__init__"),
    "after its summand": (collectives._SumOfAll, "wait"),
}
SIGNALS = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}


def before_call(place: str, happen: Callable[[], None]) -> None:
    """Let something happen before the next call of a method in ``PLACES``."""
    owner, name = PLACES[place]
    call = getattr(owner, name)

    def happening(*args: Any, **options: Any) -> Any:
        setattr(owner, name, call)
        happen()
        return call(*args, **options)

    setattr(owner, name, happening)


def second_step(fault: str, place: str, folder: str) -> tuple[str, str, float]:
    """Return what a rank fails with in its second step, in which rank 1 is lost, and when."""
    model = make("mlp")
    timeout = SHORT_TIMEOUT if fault == "is stopped" else TIMEOUT
    step = TrainStep(model, adamw(model), 2, timeout=timeout, backend="eager")
    x, y = (part(one) for one in batches("mlp", 1, size=12)[0])
    step(x, y)
    if dist.get_rank() == 1:

        def happen() -> None:
            note_time(folder)
            os.kill(os.getpid(), SIGNALS[fault])

        before_call(place, happen)
    return *told(lambda: step(x, y)), time.monotonic()


# The whole of it takes minutes: a stopped rank is waited for until the timeout. test_lost_ranks has one.
SHORT = [("is killed", "before its note"), ("is killed", "after its summand")]


@sliced("fault, place", SHORT, itertools.product(SIGNALS, PLACES))
def test_a_rank_lost_at_a_mailbox_is_named_by_every_other(
    fault: str, place: str, tmp_path: Path, tally: Callable[[str], Tally]
) -> None:
    answers = run(3, 1, second_step, fault, place, str(tmp_path))
    for rank in (0, 2):
        assert answers[rank].value, answers[rank].raised
        kind, message, when = answers[rank].value
        assert kind == "CommunicationError", message
        assert "lost rank 1 while" in message
        seconds = when - noted_time(str(tmp_path))
        allowed = SOON + (SHORT_TIMEOUT if fault == "is stopped" else 0.0)
        tally(f"a rank {fault}: at a mailbox").add(seconds < allowed, seconds=seconds)
        assert seconds < allowed


def interrupt_comparison(wire: str) -> list[tuple[str, str]]:
    """Return what the second and third steps fail with if rank 1 is interrupted while it waits for the note of rank 0.

    Rank 1 catches the interrupt and goes on at once; rank 0 comes later.
    """
    with patch.dict(os.environ, {"ZEROGRAPH_WIRE": "sockets"} if wire == "sockets" else {}):
        step = adam_step("mlp", 2, timeout=TIMEOUT, backend="eager")
        x, y = (part(one) for one in batches("mlp", 1)[0])
        step(x, y)
    if dist.get_rank() == 0:
        time.sleep(1.0)
    else:
        exchange = "_over_group" if wire == "sockets" else "_through_mailboxes"
        call = getattr(Channel, exchange)

        def interrupted(*args: Any) -> Any:
            setattr(Channel, exchange, call)
            # Its own note is sent: the other rank begins the step. Gloo lets no interrupt through while it waits.
            if wire == "memory":
                args[0]._mailboxes[0].send_note(args[0]._number, args[1])
            else:
                call(*args)
            raise KeyboardInterrupt

        setattr(Channel, exchange, interrupted)
    return [told(lambda: step(x, y)) for _ in range(2)]


@sliced("wire", ["memory"], ["sockets"])
def test_an_interrupt_of_a_comparison_that_is_caught_is_named_on_all_ranks(wire: str) -> None:
    other, own = (answer.value for answer in run(2, None, interrupt_comparison, wire))
    assert own[0][0] == "KeyboardInterrupt"
    assert other[0][0] == "CommunicationError", other[0][1]
    assert "lost rank 1 while" in other[0][1]
    for kind, message in (*other, own[1]):
        # Over sockets the ranks may be able to compare once more: they differ in where they broke off.
        assert kind in ("CommunicationError", "RankMismatchError"), message
        assert "comparing notes before step 2" in message
        assert "KeyboardInterrupt" in message
