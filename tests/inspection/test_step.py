"""Looking at a step that is only prepared: page, text, diffs, the life of a tensor, exports."""

from __future__ import annotations

import io

import networkx
import pytest
from torch import fx

from tests.inspection.models import prepared
from zerograph.errors import ConfigError
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


def test_placements_of_what_is_only_prepared(found: Prepared) -> None:
    placements = {name: str(sbp) for name, sbp in found.placements().items()}
    assert placements["model.first.weight"] == placements["model.first.weight.exp_avg"] == "S(0)"
    assert placements["model.first.weight.step"] == "B"
