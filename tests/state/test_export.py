"""Exports of a checkpoint: one safetensors file, and the files that `from_pretrained` needs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zerograph as zg
from tests.harness import LossStep, sliced
from tests.models import TokenLoss, adam_step, adamw, batches, make, part
from tests.pool import Pool
from zerograph.__main__ import app


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return TokenLoss()(model(input_ids=x).logits, y)


def pretrained(name: str) -> nn.Module:
    """Made from a configuration; nothing is downloaded."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0))


def saved(path: Path, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Two steps, a checkpoint, and the logits of the trained model."""
    model = pretrained(name)
    step = LossStep(model, adamw(model), 3, token_loss, backend="eager")
    data = batches("gpt", 2)
    for x, y in data:
        step(part(x), part(y))
    step.save(path)
    with step.full_parameters(), torch.no_grad():
        # Dropout belongs to training.
        found = model.eval()(input_ids=data[0][0]).logits
        return found, {name: value.clone() for name, value in model.state_dict().items()}


@sliced("name", ["llama"], ["gpt2"])
def test_from_pretrained_loads_what_export_wrote(pool: Pool, tmp_path: Path, name: str) -> None:
    import transformers as hf

    logits, state = pool.run(2, saved, tmp_path / "checkpoint", name)[0]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "checkpoint"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors")
    ]
    model, told = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is type(pretrained(name))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=batches("gpt", 1)[0][0]).logits, logits)
    found = zg.read_checkpoint(tmp_path / "checkpoint")["modules"]["model"]
    assert sorted(found) == sorted(state)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    plain = pretrained(name)
    plain.load_state_dict(found)
    with torch.no_grad():
        assert torch.equal(plain.eval()(input_ids=batches("gpt", 1)[0][0]).logits, logits)


def saved_plainly(path: Path, name: str) -> None:
    step = adam_step(name, 3, backend="eager")
    step(*map(part, batches(name, 1)[0]))
    step.save(path)


@pytest.fixture(scope="module")
def tied(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied") / "checkpoint"
    pool.run(2, saved_plainly, path, "gpt_tied_of_one_block")
    return path


def test_tied_weights_are_written_once_and_read_twice(tied: Path, tmp_path: Path) -> None:
    assert zg.read_checkpoint(tied)["modules"]["model"].keys() == make("gpt_tied_of_one_block").state_dict().keys()
    file = tmp_path / "weights.safetensors"
    assert CliRunner().invoke(app, ["export", str(tied), str(file)]).exit_code == 0
    held = load_file(file)
    assert "head.weight" not in held
    model = make("gpt_tied_of_one_block")
    missing, unexpected = model.load_state_dict(held, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    for key, value in zg.read_checkpoint(tied)["modules"]["model"].items():
        assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "out"], "there is no checkpoint in nowhere"),
        (["{tied}", "{tied}/index.json"], "cannot be written"),
        (["{tied}", "out", "--module", "head"], "no module 'head'; it has model"),
        (["{tied}", "s3://bucket/model.safetensors"], "s3:/bucket/model.safetensors is a URL"),
    ],
)
def test_what_cannot_be_exported_is_named(tied: Path, tmp_path: Path, arguments: list[str], said: Any) -> None:
    result = CliRunner().invoke(app, ["export", *(one.format(tied=tied) for one in arguments)])
    assert result.exit_code == 2
    assert said in result.output
