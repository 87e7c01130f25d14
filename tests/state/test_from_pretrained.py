"""Models of transformers are loaded into shards with the values of ``cls.from_pretrained``, and are never whole."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import zerograph as zg
from tests import pretrained
from tests.harness import LossStep, Predict, stores_of
from tests.models import Gpt, part, update_by
from tests.peak_memory import Live
from tests.pool import Pool
from zerograph._torch import pytree
from zerograph.runtime.checkpoint.file_tensor import FileTensor
from zerograph.runtime.parameters import SplitParameter


def tensors_of(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state and the buffers that it does not have."""
    return {**dict(model.named_buffers()), **state}


def differences(cls: Any, folder: Path, **options: Any) -> list[str]:
    """Return what differs from plain loading; ranks but the first draw other random numbers."""
    torch.manual_seed(7)
    plain = cls.from_pretrained(folder, **options)
    torch.manual_seed(7 + zg.rank())
    model = zg.from_pretrained(cls, folder, **options)
    found = [name for name, value in model.named_parameters() if not isinstance(value, SplitParameter)]
    expected = tensors_of(plain, plain.state_dict())
    actual = tensors_of(model, Predict(model).state_dict()["modules"]["model"])
    found += [] if list(actual) == list(expected) else ["names"]
    found += [
        name
        for name, value in expected.items()
        if actual[name].dtype != value.dtype or not torch.equal(actual[name], value)
    ]
    same = [
        [(name, value.requires_grad) for name, value in one.named_parameters()]
        + [one.training, str(one.config), str(getattr(one, "generation_config", None))]
        for one in (plain, model)
    ]
    return found if same[0] == same[1] else [*found, "attributes"]


def trained(folder: Path) -> tuple[float, float]:
    """Return the loss after a step of a model loaded split, and of the plain one on the whole batch."""
    ids = torch.arange(32).view(4, 8)
    losses = []
    for load in (zg.from_pretrained, transformers.GPT2LMHeadModel.from_pretrained):
        model: Any = load(transformers.GPT2LMHeadModel, folder) if load is zg.from_pretrained else load(folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if isinstance(next(model.parameters()), SplitParameter):
            step = LossStep(model, optimizer, 3, lambda model, ids: model(ids, labels=ids).loss, backend="eager")
            values = [step(part(ids)) for _ in range(2)]
        else:
            values = [update_by(optimizer, model(ids, labels=ids).loss) for _ in range(2)]
        losses.append(float(values[-1]))
    return losses[0], losses[1]


def all_differences(folders: dict[str, Path]) -> tuple[dict[str, list[str]], tuple[float, float]]:
    found = {
        "tied": differences(transformers.T5ForConditionalGeneration, folders["t5"]),
        "joined and cast": differences(transformers.MixtralForCausalLM, folders["mixtral"], dtype=torch.bfloat16),
        "missing": differences(transformers.BertForSequenceClassification, folders["bert"], dtype="float16"),
        "the other name": differences(transformers.Qwen3ForCausalLM, folders["head_only"]),
        "both names": differences(transformers.AutoModelForCausalLM, folders["both"]),
    }
    return found, trained(folders["gpt2"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: pretrained.save(pretrained.make(name), root / name) for name in ("gpt2", "llama", "t5", "mixtral")}
    made["wide"] = pretrained.save(pretrained.mixtral(intermediate_size=512), root / "wide", shards=False)
    torch.manual_seed(0)
    made["bert"] = pretrained.save(pretrained.bert(), root / "bert", shards=False)
    # Of tied weights the files have the other name, or both.
    for name in ("head_only", "both"):
        made[name] = pretrained.save(pretrained.make("qwen3"), root / name, shards=False)
        state = load_file(made[name] / "model.safetensors")
        embedding = (
            state.pop("model.embed_tokens.weight") if name == "head_only" else state["model.embed_tokens.weight"]
        )
        save_file({**state, "lm_head.weight": embedding.clone()}, made[name] / "model.safetensors", {"format": "pt"})
    return made


def test_values_are_those_of_plain_loading(pool: Pool, folders: dict[str, Path]) -> None:
    for found, (loss, plain) in pool.run(2, all_differences, folders):
        assert found == {name: [] for name in found}
        assert loss == pytest.approx(plain, rel=1e-6)


def bytes_read(folder: Path) -> tuple[int, int]:
    """Return the bytes that this rank reads as it loads a model, by the kernel's count, and those of the weights."""

    def count() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    zg.from_pretrained(transformers.MixtralForCausalLM, folder)
    before = count()
    zg.from_pretrained(transformers.MixtralForCausalLM, folder)
    return count() - before, sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_ranks_read_each_byte_once_together(pool: Pool, folders: dict[str, Path]) -> None:
    (first, size), (second, _) = pool.run(2, bytes_read, folders["wide"])
    # Besides the weights: the header and the configuration.
    assert size <= first + second <= 1.1 * size


class LiveValues(Live):
    """Count no tensors of files: they have no memory."""

    def _see(self, values: Any) -> None:
        super()._see([value for value in pytree.tree_leaves(values) if not isinstance(value, FileTensor)])


def memory(folder: Path) -> tuple[int, int, int]:
    """Return the most bytes of tensors alive at once in loading, those of this rank's parts, and of the largest."""
    with LiveValues([]) as live:
        model = zg.from_pretrained(transformers.MixtralForCausalLM, folder)
    parts = [store.flat.nbytes for store in stores_of(Predict(model))]
    return live.most, sum(parts), max(parts)


def test_no_rank_holds_more_than_its_parts_and_one_more(pool: Pool, folders: dict[str, Path]) -> None:
    for most, parts, largest in pool.run(2, memory, folders["wide"]):
        # The part that is being read: the rows of two experts, and as one tensor.
        assert parts <= most <= parts + 2.1 * largest


def loaded_from_files(folder: Path) -> list[bool]:
    """Load a graph's state from a file, before and after compiling, on shards and on whole parameters."""
    torch.manual_seed(1)
    wanted = Gpt(tied=True).state_dict()
    x = torch.zeros(2, 4, dtype=torch.int64)
    same = []
    for stage in (1, 3):
        torch.manual_seed(0)
        model = Gpt(tied=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = LossStep(model, optimizer, stage, lambda model, x: model(x).square().mean(), backend="eager")
        tensors = {name.removeprefix("other."): one for name, one in zg.open_safetensors(folder / "renamed").items()}
        for state in (folder / "model.safetensors", tensors):
            step.load_state_dict({"modules": {"model": state}})
            found = step.state_dict()["modules"]["model"]
            same += [list(found) == list(wanted), *(torch.equal(found[name], wanted[name]) for name in wanted)]
            step(x)
    return same


def test_a_graph_loads_safetensors_files(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Gpt(tied=True)
    save_model(model, tmp_path / "model.safetensors")
    (tmp_path / "renamed").mkdir()
    state = {f"other.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(state, tmp_path / "renamed" / "model.safetensors")
    assert all(all(same) for same in pool.run(2, loaded_from_files, tmp_path))


def refused(folders: dict[str, Path], root: Path) -> dict[str, str]:
    """Return the error of each wrong call, on this rank."""
    gpt2, llama = transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM
    damaged = root / "damaged" if zg.rank() else folders["llama"]
    (torch.float32, torch.bfloat16)[zg.rank()]
    calls: dict[str, Any] = {
        "argument": lambda: zg.from_pretrained(gpt2, folders["gpt2"], device_map="auto"),
        "none": lambda: zg.from_pretrained(gpt2, None),  # type: ignore[arg-type]
        "damaged index": lambda: zg.from_pretrained(llama, root / "index"),
        "no safetensors": lambda: zg.from_pretrained(llama, root / "bin"),
        "class": lambda: zg.from_pretrained(nn.Linear, folders["gpt2"]),
        "folder": lambda: zg.from_pretrained(gpt2, root / "nowhere"),
        "offline": lambda: zg.from_pretrained(gpt2, "somebody/a-model", local_files_only=True),
        "damaged on rank 1": lambda: zg.from_pretrained(llama, damaged),
        "other dtypes": lambda: zg.from_pretrained(
            gpt2, folders["gpt2"], dtype=(torch.float32, torch.bfloat16)[zg.rank()]
        ),
        "no file": lambda: Predict(Gpt(tied=True)).load_state_dict({"modules": {"model": root / "nowhere"}}),
        "other model": lambda: Predict(Gpt(tied=True)).load_state_dict({"modules": {"model": folders["bert"]}}),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((zg.ZeroGraphError, OSError)) as error:
            call()
        notes = getattr(error.value, "__notes__", [])
        found[name] = " ".join([f"{error.type.__name__}: {error.value}", *notes])
    return found


def test_what_cannot_be_loaded_is_an_error_on_all_ranks(pool: Pool, folders: dict[str, Path], tmp_path: Path) -> None:
    damaged = pretrained.save(pretrained.make("llama"), tmp_path / "damaged")
    file = max(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    index, unsafe = shutil.copytree(folders["llama"], tmp_path / "index"), tmp_path / "bin"
    (index / "model.safetensors.index.json").write_text("{")
    shutil.copytree(folders["llama"], unsafe, ignore=shutil.ignore_patterns("*.safetensors*"))
    (unsafe / "pytorch_model.bin").touch()
    first, second = pool.run(2, refused, folders, tmp_path)
    for found in (first, second):
        assert found["argument"].startswith("ConfigError: from_pretrained() does not take device_map=: give device=")
        assert found["class"].startswith("ConfigError")
        assert found["none"].startswith("ConfigError: from_pretrained() takes a folder or an id")
        assert found["damaged index"].startswith("CheckpointError")
        assert "index" in found["damaged index"]
        assert found["no safetensors"].startswith("OSError")
        assert "reads safetensors files only" in found["no safetensors"]
        assert found["folder"].startswith("OSError")
        assert "nowhere" in found["folder"]
        assert found["offline"].startswith("OSError")
        assert "cached" in found["offline"]
        assert "dtype" in found["other dtypes"] or "wte" in found["other dtypes"]
        assert found["no file"].startswith("CheckpointError")
        assert "nowhere" in found["no file"]
        assert found["other model"].startswith("ConfigError: the state of 'model' does not fit")
    assert "rank 1 failed" in first["damaged on rank 1"]
    assert file.name in first["damaged on rank 1"]
    assert second["damaged on rank 1"].startswith("CheckpointError")
    assert file.name in second["damaged on rank 1"]


def test_of_a_tensor_in_several_files_the_index_says_which_counts(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        save_file({"x": torch.tensor([float(number)]), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in ("a", "b", "c")} | {"x": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tensors: dict[str, Any] = zg.open_safetensors(tmp_path)
    assert {name: one.whole().item() for name, one in tensors.items()} == {"a": 1, "b": 1, "c": 1, "x": 1}


def test_operators_on_a_tensor_of_a_file_are_those_of_its_values(tmp_path: Path) -> None:
    values = {"a": torch.randn(5, 4, 3), "b": torch.randn(5, 2, 3), "c": torch.tensor(2.5), "d": torch.zeros(0, 3)}
    save_file(values, tmp_path / "some.safetensors")

    def opened() -> dict[str, Any]:
        return zg.open_safetensors(tmp_path / "some.safetensors")

    lazy: list[Any] = [
        lambda t: torch.stack([t["a"], t["a"].clone() if type(t["a"]) is Tensor else t["a"]]),
        lambda t: torch.stack([t["a"], t["a"]], 1),
        lambda t: torch.cat([t["a"], t["b"]], 1).to(torch.float64),
        lambda t: torch.cat([t["a"], t["a"], t["a"]], 0),
        lambda t: torch.split(t["a"], 2)[2],
        lambda t: torch.chunk(t["a"], 2, -2)[1],
        lambda t: t["c"].to(torch.bfloat16),
        lambda t: t["d"],
    ]
    for function in lazy:
        expected, actual = function(values), function(opened())
        assert isinstance(actual, FileTensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.whole(), expected)
        flat = torch.empty(max(expected.numel() - 3, 0), dtype=expected.dtype)
        if flat.numel():
            actual.copy_flat(flat, 2)
            assert torch.equal(flat, expected.flatten()[2:-1])
    tensors = opened()
    # A view is of the tensor itself.
    tensors["a"][1].zero_()
    tensors["b"].mul_(2)
    assert torch.equal(tensors["a"].whole()[1], torch.zeros(4, 3))
    assert torch.equal(tensors["b"].whole(), 2 * values["b"])
    assert torch.equal(tensors["a"].transpose(0, 2), tensors["a"].whole().transpose(0, 2))
    assert torch.equal(opened()["a"], opened()["a"])
    assert not torch.equal(opened()["a"], opened()["b"])
    assert torch.equal(torch.zeros(5, 4, 3).copy_(opened()["a"]), values["a"])


@pytest.mark.parametrize("write", [lambda t: t.zero_(), lambda t: t[1].mul_(2), lambda t: t.copy_(torch.ones_like(t))])
def test_what_is_written_to_a_tensor_of_a_file_is_in_its_views_and_in_nothing_else(
    tmp_path: Path, write: Callable[[Tensor], Any]
) -> None:
    save_file({"a": torch.randn(6, 4)}, tmp_path / "some.safetensors")
    made: list[Callable[[Tensor], Any]] = [
        lambda a: [a.to(torch.float64)],
        lambda a: [torch.stack([a, a])],
        lambda a: [torch.cat([a, a]), torch.cat([a.split(3)[1], a.split(3)[0]], 1)],
        lambda a: [torch.empty_like(a).copy_(a)],
        lambda a: [a.chunk(2, 1)[0].to(torch.bfloat16), *a.split(3)],
    ]

    def outcome(a: Tensor, make: Callable[[Tensor], Any], written: int) -> list[Tensor]:
        results = [a, *make(a)]
        write(results[written])
        return [one.whole() if isinstance(one, FileTensor) else one for one in results]

    path = tmp_path / "some.safetensors"
    for make, written in itertools.product(made, (0, -1)):
        found = outcome(zg.open_safetensors(path)["a"], make, written)
        assert all(map(torch.equal, found, outcome(load_file(path)["a"], make, written)))
