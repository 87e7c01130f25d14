"""A benchmark's script run as ``python benchmarks/...`` runs it, in this process: it has imported everything."""

from __future__ import annotations

import runpy
import signal
import sys

import pytest

from benchmarks.measure.pair import ROOT


def run(script: str, *asked: str) -> object:
    """The status that it ends with; 0 and None are good."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [script, *asked])
        patch.setattr(sys, "path", [*sys.path])
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
        finally:
            signal.signal(signal.SIGTERM, before)
    return ended.value.code
