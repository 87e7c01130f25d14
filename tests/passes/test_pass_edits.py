"""``config.passes``: passes of a user's own, for one graph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx

import zerograph as zg
from tests.inspection.models import Step
from tests.models import TrainStep, batches, make, part
from tests.pool import Pool
from zerograph.ir.mesh import line
from zerograph.passes.context import Context
from zerograph.passes.pipeline import PIPELINE, edited

aten = torch.ops.aten


def no_op(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Change nothing."""
    return module


def note_meshes(name: str, dims: dict[str, set[tuple[int, int]]]) -> zg.PassEdit:
    """After this pass, one that notes the dimensions of the mesh, and of the first SBP in the graph."""

    def noting(module: fx.GraphModule, context: Context) -> fx.GraphModule:
        sbp = next(node.meta["sbp"] for node in module.graph.nodes if "sbp" in node.meta)
        dims.setdefault(name, set()).add((context.mesh.dims, len(sbp)))
        return module

    noting.__name__ = f"noting_{name}"
    return zg.PassEdit.after(name, noting)


def prepared(*edits: zg.PassEdit, micro_batches: int = 1) -> Any:
    step = Step()
    step.config.passes = edits
    step.config.gradient_accumulation_steps = micro_batches
    return step.prepare(line(2, 0, "ranks"), torch.empty(2 * micro_batches, 16, device="meta"))


def test_passes_are_inserted_replaced_and_disabled() -> None:
    def own(module: fx.GraphModule, context: Context) -> fx.GraphModule:
        return module

    names = [one.name for one in PIPELINE]
    edits = (
        zg.PassEdit.after("place", no_op),
        zg.PassEdit.before("no_op", own),
        zg.PassEdit.disable("recompute_cheap"),
    )
    ran = [record.name for record in prepared(*edits).passes[1:]]
    at = names.index("place") + 1
    assert ran == [name for name in [*names[:at], "own", "no_op", *names[at:]] if name != "recompute_cheap"]


def test_a_replaced_pass_keeps_its_place() -> None:
    step = prepared(zg.PassEdit.replace("recompute_cheap", no_op))
    names = ["no_op" if one.name == "recompute_cheap" else one.name for one in PIPELINE]
    assert [record.name for record in step.passes[1:]] == names
    assert not step.diff("hoist_batch_statistics", "no_op")


PASSES = ("place", "hoist_batch_statistics", "reshard_after_forward", "localize", "loop", "schedule", "gather_in_place")


IN_TIME = ("place", "hoist_batch_statistics", "reshard_after_forward", "localize")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_inserted_pass_sees_the_mesh_that_its_graph_has(micro_batches: int) -> None:
    dims: dict[str, set[tuple[int, int]]] = {}
    prepared(*(note_meshes(name, dims) for name in PASSES), micro_batches=micro_batches)
    assert dims == {name: {(micro_batches if name in IN_TIME else 1,) * 2} for name in PASSES}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (zg.PassEdit.disable("loop"), "does not run without it"),
        (zg.PassEdit.disable("lop"), "there is no such pass\nThere are simplify"),
        (zg.PassEdit.after("lop", no_op), "there is no such pass"),
        (zg.PassEdit.after("place", PIPELINE[0].run), "there is a pass of that name already"),
    ],
)
def test_edits_that_cannot_be_made_are_errors(edit: zg.PassEdit, message: str) -> None:
    with pytest.raises(zg.ConfigError, match=message):
        prepared(edit)


def test_what_is_no_edit_is_refused_where_it_is_set() -> None:
    with pytest.raises(zg.ConfigError, match="PassEdit"):
        Step().config.passes = [no_op]  # type: ignore[assignment]
    with pytest.raises(zg.ConfigError, match="is no pass"):
        zg.PassEdit.after("place", "no_op")  # type: ignore[arg-type]


def test_a_pass_that_returns_nothing_is_an_error() -> None:
    def forgets(module: fx.GraphModule, context: Context) -> None:
        """Forget to return the graph."""

    with pytest.raises(zg.VerificationError, match="the pass forgets returned NoneType"):
        prepared(zg.PassEdit.after("place", forgets))  # type: ignore[arg-type]


def test_every_pass_stands_where_its_scope_and_time_say() -> None:
    place, localize, loop = (
        next(at for at, one in enumerate(PIPELINE) if one.name == name) for name in ("place", "localize", "loop")
    )
    for at, one in enumerate(PIPELINE):
        scope = "global" if at <= place else "placed" if at <= localize else "local"
        assert (one.scope, one.time) == (scope, at <= loop), one.name
    assert edited(()) == PIPELINE


def test_the_digest_follows_the_code_of_the_pass() -> None:
    def scaled(factor: int) -> Any:
        def scale(module: fx.GraphModule, context: Context) -> fx.GraphModule:
            return module if factor + 1 else fx.GraphModule(module, module.graph)

        return scale

    one, same, other = (str(zg.PassEdit.after("place", scaled(factor))) for factor in (1, 1, 2))
    assert one == same != other


def trained_with_a_pass_on_rank_0() -> str:
    model = make("mlp")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    if zg.rank() == 0:
        step.config.passes = (zg.PassEdit.after("place", no_op),)
    x, y = batches("mlp", 1)[0]
    with pytest.raises(zg.RankMismatchError) as caught:
        step(part(x), part(y))
    return str(caught.value)


def test_ranks_with_other_passes_are_named(pool: Pool) -> None:
    for message in pool.run(2, trained_with_a_pass_on_rank_0):
        assert "after place: no_op" in message


def test_an_error_in_a_users_pass_names_the_pass_and_the_graph() -> None:
    def divides(module: fx.GraphModule, context: Context) -> fx.GraphModule:
        raise ZeroDivisionError("by a user")

    with pytest.raises(ZeroDivisionError, match="by a user") as caught:
        prepared(zg.PassEdit.after("place", divides))
    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"config.passes: the pass divides failed, on the graph after place \(\d+ nodes\)", notes)
    assert "the step of Step" in notes
