"""Looking at a step that is only prepared: page, text, diffs, the life of a tensor, exports."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import networkx
import pytest
from torch import fx

from tests.zerograph.inspection.models import prepared
from zerograph.errors import ConfigError
from zerograph.inspection import exports
from zerograph.inspection.lifetime import Life
from zerograph.inspection.names import labels
from zerograph.inspection.step import Prepared


@pytest.fixture(scope="module")
def found() -> Prepared:
    return prepared()


def test_a_line_has_module_operator_dtype_sbp_shapes_and_source(found: Prepared) -> None:
    text = found.text(module="model.blocks.0.up")
    (product,) = (line for line in text.splitlines() if "= addmm(" in line)
    assert product.split()[0].startswith("model.blocks.0.up:addmm")
    assert "addmm(model.blocks.0.up.bias, " in product
    # Two ranks with two rows each.
    assert "f32 S(0) (4, 32) -> (2, 32)  # forward" in product
    assert "inspection/models.py:" in product


def test_nodes_keep_their_names_from_pass_to_pass(found: Prepared) -> None:
    before, after = (
        {line.removeprefix(">>").removeprefix("input").split()[0] for line in text}
        for text in found.texts("place", "box")
    )
    assert before < after
    assert all(":boxing" in name for name in after - before)


def test_every_collective_stands_out(found: Prepared) -> None:
    marked = [line for line in found.text().splitlines() if line.startswith(">>")]
    assert len(marked) == len(found.collectives())
    assert sum("all-gather S(0) -> B" in line for line in marked) > 0


def test_a_schedule_only_moves_lines(found: Prepared) -> None:
    diff = found.diff("release", "schedule")
    assert (diff.removed, diff.added) == (0, 0)
    assert diff.moved > 0


def test_names_that_there_are_not_are_errors_with_close_ones(found: Prepared) -> None:
    with pytest.raises(ConfigError, match="did you mean 'place'"):
        found.text("plaec")
    with pytest.raises(ConfigError, match=r"did you mean 'model\.blocks"):
        found.text(module="model.block.0")
    with pytest.raises(ConfigError, match=r"did you mean 'model\.first\.weight'"):
        found.explain("model.first.wieght")


def whats(life: Life) -> list[str]:
    return [one.what for one in life.events]


def test_at_stage_3_a_weight_is_gathered_used_and_freed_twice(found: Prepared) -> None:
    life = found.explain("model.blocks.0.up.weight")
    turns = [what for what in whats(life) if what in ("gather starts", "gather ends", "used", "freed")]
    assert turns == ["gather starts", "gather ends", "used", "freed"] * 2
    assert [one.phase for one in life.of("used")] == ["forward", "backward"]
    assert all("self.up(self.norm(x))" in one.code for one in life.of("used"))


def test_its_gradient_is_made_reduced_and_used_to_update_it(found: Prepared) -> None:
    what = whats(found.explain("model.blocks.0.up.weight"))
    order = ["gradient made", "reduction starts", "reduction ends", "updated"]
    assert [one for one in what if one in order] == order


def test_the_ranks_parts_of_a_weight_are_all_of_it(found: Prepared) -> None:
    other = prepared(rank=1)
    for name in ("model.first.weight", "model.blocks.1.up.weight", "model.blocks.1.norm.bias"):
        numel = {"model.first.weight": 256, "model.blocks.1.up.weight": 512, "model.blocks.1.norm.bias": 16}[name]
        assert found.explain(name).bytes + other.explain(name).bytes == 4 * numel


def test_the_life_of_state_inputs_and_activations(found: Prepared) -> None:
    assert whats(found.explain("model.first.weight.exp_avg")) == ["stored", "updated"]
    given = found.explain("input0")
    assert given.of("given")[0].bytes == 2 * 16 * 4
    assert {one.phase for one in given.of("used")} == {"forward", "backward"}
    made = found.explain("model.blocks.0")
    assert made.of("made")[0].module == "model.blocks.0"
    assert made.shape == (4, 16)
    assert made.local == (2, 16)


def test_every_node_of_the_text_can_be_explained(found: Prepared) -> None:
    for node, name in list(labels(found.emitted).items())[::8]:
        if node.op == "call_function" and getattr(node.meta.get("val"), "shape", None) is not None:
            assert found.explain(name).of("made")[0].node == node.name


def test_a_tied_weight_goes_by_both_names() -> None:
    step = prepared(tied=True, layers=1)
    one, other = step.explain("model.first.weight"), step.explain("model.last.weight")
    assert (one.name, one.events) == (other.name, other.events)
    assert {event.module for event in one.of("used")} == {"model.first", "model.last"}
    # It is read where both are, and its gradients add up.
    assert len(one.of("gradient made")) == 1


def test_of_micro_batches_every_event_says_how_often() -> None:
    step = prepared(micro_batches=3, layers=1, stage=3)
    life = step.explain("model.blocks.0.up.weight")
    assert {one.times for one in life.of("used")} == {3}
    assert {one.times for one in life.of("updated")} == {1}
    assert "  | " in step.text()
    assert "loop over 3 micro-batches" in step.text()


def test_the_page_is_no_longer_for_a_deeper_model() -> None:
    few, many = prepared(layers=7).page(), prepared(layers=9).page()
    assert len(many.splitlines()) == len(few.splitlines()) <= 24
    assert max(map(len, many.splitlines())) <= 110


def test_the_page_has_what_matters(found: Prepared) -> None:
    page = found.page()
    sent = sum(one.bytes for one in found.collectives())
    parameters = 2 * 256 + 2 * (2 * 16 + 32 * 16 + 32 + 16 * 32 + 16)
    assert f"{sent:,} bytes" in page
    assert f"placed: {parameters:,} parameters" in page
    for text in ("input0", "output0", "gradient S(0)", "AdamW", "at the peak", "warnings: none"):
        assert text in page


def test_the_description_names_every_parameter_and_pass(found: Prepared) -> None:
    text = found.describe()
    assert all(slot.name in text for bucket in found.context.buckets for slot in bucket.slots)
    assert all(record.name in text for record in found.passes)


def test_networkx_has_every_node_and_every_read(found: Prepared) -> None:
    graph = found.to_networkx()
    nodes: list[fx.Node] = list(found.emitted.nodes)
    assert set(graph) == {node.name for node in nodes}
    assert graph.number_of_edges() == sum(len(node.all_input_nodes) for node in nodes)
    gathers = [about for _, about in graph.nodes(data=True) if about["boxing"] == "all-gather"]
    assert {about["tensor"] for about in gathers} == {bucket.name for bucket in found.context.buckets}
    networkx.write_graphml(graph, io.BytesIO())


def test_graphviz_draws_a_module_and_what_enters_it(found: Prepared) -> None:
    text = found.to_graphviz("model.blocks.0.up")
    assert text.startswith('digraph "model.blocks.0.up" {')
    assert 'label="model.blocks.0.up"' in text
    assert text.count("{") == text.count("}")
    with pytest.raises(ConfigError, match="no node of this graph belongs"):
        found.to_graphviz("model.nothing")


def test_frames_of_modules_are_nested(found: Prepared) -> None:
    depth, at = 0, {}
    for line in found.to_graphviz("model.blocks").splitlines():
        if (frame := re.match(r' *subgraph "cluster (.+?)" {', line)) is not None:
            at[frame[1]] = depth
            depth += 1
        depth -= line.strip() == "}"
    # Nothing computes in model.blocks itself: it has no frame.
    assert at["model.blocks.0"] == at["model.blocks.1"] == 0
    assert at["model.blocks.0.up"] == at["model.blocks.1.norm"] == 1


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_dot_draws_every_node_and_edge(tmp_path: Path, micro_batches: int) -> None:
    found = prepared(micro_batches=micro_batches)
    found.to_graphviz(svg=tmp_path / "step.svg")
    space = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.parse(tmp_path / "step.svg").getroot().findall(f".//{space}g")
    graph = found.to_networkx()
    assert {one.findtext(f"{space}title") for one in drawn if one.get("class") == "node"} == set(graph)
    assert sum(one.get("class") == "edge" for one in drawn) == graph.number_of_edges()
    frames = {one.findtext(f"{space}text") for one in drawn if one.get("class") == "cluster"}
    assert {"model.first", "model.blocks.0", "model.blocks.0.up"} <= frames
    assert [one.name for one in tmp_path.iterdir()] == ["step.svg"]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
def test_a_drawing_that_cannot_be_written_is_an_error(found: Prepared, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a writable folder"):
        found.to_graphviz(svg=tmp_path / "nowhere" / "step.svg")


def test_without_graphviz_a_drawing_is_an_error_that_says_so(found: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="Install Graphviz"):
        found.to_graphviz("model.first", svg="drawing.svg")


def test_tensorboards_numbers_are_those_of_the_step(found: Prepared) -> None:
    scalars = exports.scalars(found)
    assert scalars["zerograph/memory/peak"] == found.memory.peak
    assert scalars["zerograph/bytes sent/all"] == sum(one.bytes for one in found.collectives())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_tensorboard_reads_what_is_written(tmp_path: Path, micro_batches: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = prepared(micro_batches=micro_batches)
    found.to_tensorboard(tmp_path / "runs", step=7)
    # TensorBoard goes on reading only the last file of a folder.
    assert len(list((tmp_path / "runs").iterdir())) == 1
    read = EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    expected = exports.scalars(found)
    assert {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()["scalars"]} == {
        name: [(7, pytest.approx(value))] for name, value in expected.items()
    }
    assert read.Tags()["run_metadata"] == []
    graph, drawn = found.to_networkx(), {node.name: node for node in read.Graph().node}
    places = {one: _place(one, about) for one, about in graph.nodes(data=True)}
    assert set(drawn) == set(places.values())
    reads = sorted((source, name) for name, node in drawn.items() for source in node.input)
    assert reads == sorted((places[source], places[target]) for source, target in graph.edges())
    gathers = [node for node in drawn.values() if node.op == "all-gather"]
    assert {node.attr["tensor"].s.decode() for node in gathers} == {bucket.name for bucket in found.context.buckets}


def _place(name: str, about: dict[str, str]) -> str:
    """In TensorBoard's tree: below its module, or where it has none its phase."""
    return "/".join([*(about["module"] or about["phase"] or about["kind"]).split("."), name])


def test_without_tensorboard_its_files_are_an_error_that_says_so(
    found: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        found.to_tensorboard("runs")


def test_placements_of_what_is_only_prepared(found: Prepared) -> None:
    placements = {name: str(sbp) for name, sbp in found.placements().items()}
    assert placements["model.first.weight"] == placements["model.first.weight.exp_avg"] == "S(0)"
    assert placements["model.first.weight.step"] == "B"
