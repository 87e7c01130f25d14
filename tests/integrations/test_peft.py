"""Adapters of PEFT, trained on two ranks with a sharded base, are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.test_transformers import assert_equal, run
from tests.integrations.trainers import llama
from tests.pool import Pool

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

KINDS = ["lora", "lora and a layer", "dora", "ia3", "prompt"]


def test_adapters_are_those_of_one_process_and_are_saved_alone(pool: Pool, tmp_path: Path) -> None:
    options = {"kinds": KINDS}
    expected = run("adapters", tmp_path / "plain", 1, None, options)
    for logs in pool.run(2, run, "adapters", tmp_path / "zero", 2, 3, options):
        for kind in KINDS:
            assert_equal(logs[kind], expected[kind])
    for kind in KINDS:
        saved, plain = (
            load_file(tmp_path / who / kind / "saved" / "adapter_model.safetensors") for who in ("zero", "plain")
        )
        torch.testing.assert_close(saved, plain, rtol=0, atol=1e-5)
    merged = peft.PeftModel.from_pretrained(llama(), tmp_path / "zero" / "lora" / "saved").merge_and_unload()
    assert not any("lora" in name for name in merged.state_dict())
