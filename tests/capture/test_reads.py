"""Every way of reading a value while ``build()`` is traced is an error that names the line."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import pickle
import pprint
import string
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep

LOG = logging.getLogger(__name__)


@dataclass
class Metrics:
    loss: Tensor


def caught(loss: Tensor) -> float:
    try:
        return float(loss)
    except Exception:
        return 0.0


def suppressed(loss: Tensor) -> None:
    with contextlib.suppress(Exception):
        loss.item()


def translated(loss: Tensor) -> float:
    try:
        return float(loss)
    except Exception as error:
        raise ValueError("no number") from error


READS: dict[str, Callable[[Tensor], object]] = {
    "format": lambda loss: f"{loss:.3f}",
    "str.format": lambda loss: "{:.3f}".format(loss),  # noqa: UP032
    "percent": lambda loss: "%.3f" % loss,  # noqa: UP031
    "text": lambda loss: f"loss: {loss}",
    "print": lambda loss: print(loss),
    "print in a dict": lambda loss: print({"loss": loss}),
    "pprint": lambda loss: pprint.pformat({"loss": loss}),
    "dataclass": lambda loss: str(Metrics(loss)),
    "Formatter": lambda loss: string.Formatter().format("{:.3f}", loss),
    "logging": lambda loss: LOG.warning("loss %s", loss),
    "logging of a number": lambda loss: LOG.warning("loss %.3f", loss),
    "logging of a message": lambda loss: LOG.warning(loss),
    "assert_close": lambda loss: torch.testing.assert_close(loss, loss + 0),
    "numpy": lambda loss: loss.detach().numpy(),
    "asarray": lambda loss: numpy.asarray(loss.detach()),
    "dlpack": lambda loss: numpy.from_dlpack(loss.detach()),
    "pickle": lambda loss: pickle.dumps(loss.detach()),
    "tolist": lambda loss: loss.expand(2).tolist(),
    "bool": bool,
    "int": int,
    "float": float,
    "comparison": lambda loss: 1 if loss > 3 else 2,
    "item": lambda loss: loss.item(),
    "index": lambda loss: [1, 2][loss.long()],
    "equal": lambda loss: torch.equal(loss, loss + 1),
    "allclose": lambda loss: torch.allclose(loss, loss + 1),
    "contains": lambda loss: 3 in loss.expand(2),
    "tensor": lambda loss: torch.tensor([1.0, loss.detach()]),
    "as_tensor": lambda loss: torch.as_tensor([loss.detach()]),
    "new_tensor": lambda loss: loss.new_tensor([loss.detach(), 1.0]),
    "FloatTensor": lambda loss: torch.FloatTensor([loss.detach()]),
    "storage": lambda loss: loss.detach().untyped_storage().tolist(),
    "mean of numpy": lambda loss: numpy.mean([loss.detach()]),
    # Python and C put errors of their own in place of the read's.
    "islice": lambda loss: list(itertools.islice(range(9), loss.detach().long())),
    "struct": lambda loss: struct.pack("f", loss),
    "caught": caught,
    "suppressed": suppressed,
    "translated": translated,
}


class Net(nn.Linear):
    read: Callable[[Tensor], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        if self.read is not None:
            self.read(loss)
        return loss


class Step(LossStep):
    def __init__(self, read: Any = None) -> None:
        model = Net(3, 3)
        model.read = read
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, x: Tensor, scale: float) -> Tensor:
        loss: Tensor = self.model(x) * scale
        loss.backward()
        return loss


@pytest.mark.parametrize("name", READS)
def test_a_read_in_build_is_an_error_with_the_line(name: str) -> None:
    with pytest.raises(zg.CaptureError, match=r"(?s)build\(\).*test_reads.py:\d+"):
        Step(READS[name])(torch.ones(2, 3), 1.0)


class Branching(nn.Linear):
    """A model whose result depends on whether a value can be read."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        try:
            return loss if loss.item() > 1e6 else 2 * loss
        except Exception:
            return loss


def test_a_prepared_model_reads_in_a_try_as_in_plain_pytorch() -> None:
    plain = Branching(3, 3)
    expected = plain(torch.ones(2, 3)).item()
    assert zg.prepare(plain)(torch.ones(2, 3)).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in READS if name != "pickle"])
def test_a_prepared_model_may_read_values(name: str) -> None:
    model = zg.prepare(Net(3, 3))
    model.read = READS[name]
    for _ in range(3):
        loss = model(torch.ones(2, 3))
    assert torch.isfinite(loss)


def test_a_prepared_model_logs_the_values_of_every_call() -> None:
    """Through a handler, which swallows errors of a message, each record with a value."""
    records = io.StringIO()
    handler = logging.StreamHandler(records)
    LOG.addHandler(handler)
    model = zg.prepare(Net(3, 3))
    model.read = READS["logging of a number"]
    try:
        losses = [float(model(torch.ones(2, 3))) for _ in range(4)]
    finally:
        LOG.removeHandler(handler)
    assert records.getvalue().splitlines() == [f"loss {loss:.3f}" for loss in losses]


@pytest.mark.parametrize("arguments", [(torch.ones(2, 3),), (torch.ones(2, 3), 1.0, 2.0)])
def test_a_wrong_number_of_arguments_names_the_call(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(zg.InputError, match=r"(?s)other arguments than its build\(\) takes: .*test_reads.py:\d+"):
        Step()(*arguments)


def clipped(poison: bool, prepare: Any) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Net(3, 3)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for number in range(3):
        x = torch.randn(2, 3)
        if poison and number == 1:
            x[0, 0] = torch.inf
        model(x).backward()
        try:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)))
            optimizer.step()
        except RuntimeError as error:
            norms.append(-1.0 if "The total norm of order 2.0" in str(error) else -2.0)
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("poison", [False, True])
def test_clipping_raises_for_a_norm_that_is_not_finite_before_the_update(poison: bool) -> None:
    expected = clipped(poison, lambda *objects: objects)
    assert clipped(poison, zg.prepare) == pytest.approx(expected)
    assert (-1.0 in expected) == poison
