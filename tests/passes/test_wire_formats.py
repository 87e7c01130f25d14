"""Wire formats: what is coded, how many bytes are sent, and what a graph cannot be given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import zerograph as zg
from tests.harness import LossStep, prepare, sum_of_squares
from tests.models import TrainStep, adam_step, adamw, batches, make
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh, line
from zerograph.ir.metadata import Coded, boxing_of, meta
from zerograph.ir.wire import wire
from zerograph.ops import blocks
from zerograph.ops.blocks import Codec
from zerograph.passes.context import Context

RANKS = 2
# Elements of the bucket: one parameter of whole blocks.
NUMEL = 64 * 64


def prepared(stage: int, wire: Any, model: nn.Module | None = None, **options: Any) -> Prepared:
    torch.manual_seed(0)
    module = model or nn.Linear(64, 64, bias=False)
    dtype = next(module.parameters()).dtype
    step = LossStep(module, adamw(module), stage, sum_of_squares, wire=wire, **options)
    return prepare(step, torch.randn(8, 64, dtype=dtype), ranks=RANKS)


def sent(step: Prepared) -> list[tuple[str, int]]:
    return [(one.kind, one.bytes) for one in step.collectives() if one.tensor_bytes > 8]


@pytest.mark.parametrize(("code", "bits"), [("bf16", 16), ("int8", 8 + 32 / 256), ("int4", 4 + 16 / 256)])
def test_codes_and_scales_are_counted_and_nothing_else_is_sent(code: str, bits: float) -> None:
    piece = NUMEL // RANKS * bits / 8
    gather, reduce = ("all-gather", piece), ("reduce-scatter", piece)
    assert sent(prepared(0, code)) == [reduce, gather]
    assert sent(prepared(1, code)) == sent(prepared(2, code)) == [gather, reduce]
    assert sent(prepared(2, {"gather": code})) == [gather, ("reduce-scatter", 4 * NUMEL // RANKS)]
    for step in (prepared(2, code), prepared(0, code)):
        for one in step.collectives():
            assert one.format.startswith(code) == (one.tensor_bytes > 8)


def test_residuals_are_predicted_as_bf16_of_the_whole_gradient() -> None:
    exact, fed = (prepared(2, {"reduce": zg.wire("int4", feedback=feedback)}).memory for feedback in (False, True))
    assert fed.at_rest - exact.at_rest == 2 * NUMEL


def test_received_weights_are_predicted_as_stored_instead_of_gathered() -> None:
    exact, fed = (prepared(2, {"gather": zg.wire("int4", feedback=feedback)}).memory for feedback in (False, True))
    assert fed.at_rest - exact.at_rest == 4 * NUMEL


def test_differences_are_counted_as_codes() -> None:
    (gather,) = [one for one in prepared(2, {"gather": zg.wire("int4", feedback=True)}).collectives() if one.format]
    assert gather.format == "int4 in blocks of 256, bfloat16 scales, differences"
    assert gather.bytes == NUMEL // RANKS * (4 + 16 / 256) / 8


def test_stage_3_frees_the_weights_that_differences_are_taken_from() -> None:
    with pytest.raises(zg.PlacementError, match=r"stage 3 frees \(bucket0\)\nChoose stage 1 or 2"):
        prepared(3, {"gather": zg.wire("int4", feedback=True)})


def test_feedback_is_a_switch() -> None:
    with pytest.raises(zg.ConfigError, match="give True or False"):
        zg.wire("int4", feedback=1)  # type: ignore[arg-type]


def test_formats_may_differ_between_mesh_dimensions() -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False)
    formats = {"gather": "int8", "reduce": {0: "int4", 1: zg.wire("int8", block=32)}}
    step = LossStep(module, adamw(module), 2, sum_of_squares, wire=formats)
    grid = step.prepare(Mesh((2, 2), (0, 0), ("nodes", "ranks")), torch.randn(256, 64))
    found = [(one.kind, one.mesh_dim, one.bytes) for one in grid.collectives() if "bucket" in one.what]
    assert found == [
        ("all-gather", 1, round(NUMEL / 2 * (1 + 4 / 256))),
        ("reduce-scatter", 1, round(NUMEL / 2 * (1 + 4 / 32))),
        # An all-reduce of this rank's half: its sums are gathered along the first dimension.
        ("reduce-scatter", 0, round(NUMEL / 4 * (1 / 2 + 2 / 256))),
        ("all-gather", 0, round(NUMEL / 4 * (1 + 4 / 256))),
    ]


def test_on_a_grid_stage_3_sends_only_sums_of_gradients_between_rows() -> None:
    """As many bytes as hpZ's forward gather and reduction together: 2 M (H - 1) / (H k)."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False)
    step = LossStep(module, adamw(module), 3, sum_of_squares)
    grid = step.prepare(Mesh((2, 2), (0, 0), ("hosts", "ranks")), torch.randn(256, 64))
    found = [(one.kind, one.mesh_dim, one.bytes) for one in grid.collectives() if "bucket" in one.what]
    inside = [("all-gather", 1), ("reduce-scatter", 1)]
    assert [one[:2] for one in found if one[1] == 1] == [*inside[:1] * (len(found) - 2), inside[1]]
    assert [one for one in found if one[1] == 0] == [("all-reduce", 0, 2 * 4 * NUMEL * 1 // (2 * 2))]


def test_a_dimension_that_the_mesh_does_not_have_is_an_error() -> None:
    module = nn.Linear(9, 11)
    step = LossStep(module, adamw(module), 2, sum_of_squares, wire={"reduce": {0: "int8", 1: "int4"}})
    with pytest.raises(zg.PlacementError, match=r"'reduce' names the mesh dimension 1, but the mesh \(2,\) has 1"):
        prepare(step, torch.randn(8, 9), ranks=2)
    prepare(step, torch.randn(8, 9), ranks=1)


def test_an_all_reduce_of_bf16_sums_equal_pieces_on_a_grid() -> None:
    module = nn.Linear(9, 11)
    step = LossStep(module, adamw(module), 2, sum_of_squares, wire="bf16")
    grid = step.prepare(Mesh((2, 2), (0, 0), ("nodes", "ranks")), torch.randn(256, 9))
    (bucket,) = grid.context.buckets
    assert bucket.padded % 4 == 0
    assert [one.kind for one in grid.collectives() if one.mesh_dim == 0 and "bucket" in one.what] == [
        "reduce-scatter",
        "all-gather",
    ]


def test_values_of_the_user_are_never_lossy() -> None:
    """The verifier refuses a pass that codes a loss."""

    def code_everything(module: fx.GraphModule, context: Context) -> fx.GraphModule:
        for node in module.graph.nodes:
            if (change := boxing_of(node)) is not None and change.tensor.kind == "value":
                meta(node)["boxing"] = replace(change, reduced=Coded(wire("bf16").codec, 2))
        return module

    edits = (zg.PassEdit.before("localize", code_everything),)
    with pytest.raises(zg.VerificationError, match="only parameters and gradients may be lossy"):
        prepared(2, "int8", passes=edits)


@pytest.mark.parametrize("code", ["int8", "int4"])
def test_the_code_of_a_slice_is_a_slice_of_the_code(code: str) -> None:
    codec = Codec(code, 32, torch.bfloat16)  # type: ignore[arg-type]
    values = torch.randn(40 * 32, generator=torch.Generator().manual_seed(0))
    whole = blocks.encode(values, *codec.arguments)
    pieces = [blocks.encode(piece, *codec.arguments) for piece in values.split([32, 32 * 9, 32 * 30])]
    assert torch.equal(torch.cat(pieces), whole)
    assert whole.nbytes == codec.coded_bytes(values.numel())
    decoded = blocks.decode(whole, *codec.arguments, torch.float32)
    largest = values.view(-1, 32).abs().amax(1, keepdim=True)
    steps = (decoded - values).view(-1, 32).abs() * {"int8": 127, "int4": 7}[code] / largest
    # Half a step, and what a scale of bf16 is rounded by.
    assert steps.max() <= 0.5 + 127 / 256


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("code", ["int8", "int4"])
def test_a_block_with_a_number_that_is_not_finite_is_not_finite(code: str, bad: float) -> None:
    codec = wire(code, block=16).codec
    values = torch.ones(48)
    values[20] = bad
    decoded = blocks.decode(blocks.encode(values, *codec.arguments), *codec.arguments, torch.float32)
    assert not decoded[16:32].isfinite().any()
    assert decoded[:16].isfinite().all()
    assert decoded[32:].isfinite().all()


@pytest.mark.parametrize("code", ["bf16", "int8", "int4"])
def test_the_error_of_a_code_is_what_it_lacks_and_0_where_it_is_not_finite(code: str) -> None:
    codec = wire(code).codec
    blocks_of = {"zeros": torch.zeros(256), "outlier": torch.full((256,), 1e-3), "nan": torch.ones(256)}
    blocks_of["outlier"][7], blocks_of["nan"][7] = 1e20, float("nan")
    blocks_of["denormal"], blocks_of["normal"] = torch.full((256,), 1e-40), torch.randn(256)
    values = torch.cat(list(blocks_of.values()))
    coded = blocks.encode(values, *codec.arguments)
    error = blocks.coding_error(values, coded, *codec.arguments, torch.float32)
    lacking = values - blocks.decode(coded, *codec.arguments, torch.float32)
    assert torch.equal(error, lacking.nan_to_num(0.0))
    assert error.isfinite().all()
    if code == "int4":
        # What an outlier leaves no code for is kept.
        assert torch.equal(error[256 + 8 : 512], values[256 + 8 : 512])


@pytest.mark.parametrize("code", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sum_is_coded_with_the_bits_of_its_parts(code: str, dtype: torch.dtype) -> None:
    codec = wire(code, scales=torch.bfloat16).codec
    values = torch.randn(2 * 2**18 + 1024) * torch.logspace(-45, 30, 2 * 2**18 + 1024)
    residual = (values * torch.randn(len(values)) / 16).bfloat16()
    values[300], values[2**18 + 9] = float("nan"), float("inf")
    total = values + residual
    coded = blocks.encode(total, *codec.arguments)
    error = blocks.coding_error(total, coded, *codec.arguments, dtype)
    assert all(map(torch.equal, blocks.encode_sum(values, residual, *codec.arguments, dtype), (coded, error)))


def test_error_feedback_is_one_operator_for_each_bucket() -> None:
    step = adam_step("mlp", 2, wire={"reduce": wire("int4", feedback=True)})
    prepared = step.prepare(line(2, 0, "ranks"), *(tensor.chunk(2)[0] for tensor in batches("mlp", 1)[0]))
    targets = [node.target for node in prepared.graph.graph.nodes]
    assert targets.count(blocks.encode_sum) == len(prepared.context.buckets)
    assert blocks.coding_error not in targets


def test_tiny_and_zero_blocks_are_finite() -> None:
    codec = wire("int8", block=16).codec
    values = torch.cat([torch.zeros(16), torch.full((16,), 1e-45), torch.full((16,), 3e-38)])
    decoded = blocks.decode(blocks.encode(values, *codec.arguments), *codec.arguments, torch.float32)
    assert decoded.isfinite().all()
    assert torch.equal(decoded[:16], values[:16])
    assert (decoded - values).abs().max() <= 1.2e-38 * 127


def test_gradients_that_a_bucket_keeps_exact_are_a_warning() -> None:
    """The gradient of a penalty is the same on all ranks, and cannot be concatenated with partial sums."""
    module = nn.Linear(64, 64)

    def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, module.weight).square().sum() + module.bias.square().sum()

    step = LossStep(module, adamw(module), 2, penalised, wire={"reduce": "int8"})
    with pytest.warns(UserWarning, match=r"gradients of bucket0 are reduced one by one .* model.bias is the same"):
        assert not any(one.format for one in prepare(step, torch.randn(1024, 64)).collectives())


class Quantized(nn.Module):
    """A weight of 8 bits that nobody trains, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(64, 64, bias=False)
        self.frozen = nn.ParameterList([nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x) @ self.frozen[0].float()


def test_frozen_parameters_of_whole_numbers_are_refused_without_advice_to_convert_them() -> None:
    with pytest.raises(
        zg.PlacementError,
        match=r"frozen.0, .*is torch.int8, which int8 cannot code\nSet .*: config.precision.wire = {'reduce': 'int8'}",
    ):
        prepared(2, "int8", Quantized())


def test_parameters_of_fp64_are_refused_with_their_name() -> None:
    with pytest.raises(zg.PlacementError, match=r"bucket0 \(model.weight, ...\) is torch.float64, which int8 cannot"):
        prepared(2, "int8", nn.Linear(64, 64, bias=False).double())
    prepared(2, "exact", nn.Linear(64, 64, bias=False).double())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("fp8", "choose 'exact', 'bf16', 'int8', 'int4'"),
        ({"scatter": "int8"}, "the kind 'scatter': choose 'gather' or 'reduce'"),
        ({"gather": {-1: "int8"}}, "the mesh dimension -1"),
        ({"gather": {0: 8}}, "gather: 8: choose"),
    ],
)
def test_an_unknown_format_is_refused(value: Any, says: str) -> None:
    config = zg.Config()
    with pytest.raises(zg.ConfigError, match=says):
        config.precision.wire = value
    assert config.precision.wire == "exact"


def test_a_block_is_a_power_of_two() -> None:
    for block in (100, 8, 2.0, True):
        with pytest.raises(zg.ConfigError, match="give a power of two, 16 or more"):
            zg.wire("int8", block=block)  # type: ignore[arg-type]
    with pytest.raises(zg.ConfigError, match=r"choose torch.float32 or torch.bfloat16"):
        zg.wire("int8", scales=torch.float16)
    with pytest.raises(zg.ConfigError, match="no blocks"):
        zg.wire("bf16", block=256)


def test_parameters_begin_at_blocks_whatever_the_ranks() -> None:
    model = make("mlp")
    offsets = []
    for ranks in (1, 2, 3):
        step = TrainStep(model, adamw(model), 3, wire="int8")
        (bucket,) = prepare(step, *batches("mlp", 1, 12)[0], ranks=ranks).context.buckets
        offsets.append([slot.offset for slot in bucket.slots])
        assert bucket.padded % (ranks * 256) == 0
    assert offsets[0] == offsets[1] == offsets[2]
    assert all(offset % 256 == 0 for offset in offsets[0])


def test_gathers_and_sums_still_overlap() -> None:
    """Codes wait as late as whole tensors did: a reduction is awaited where the update reads it."""
    nodes = [node.target for node in prepared(2, "int8").graph.graph.nodes]
    start = max(at for at, target in enumerate(nodes) if "exchange_rows" in str(target))
    assert nodes.index(blocks.sum_decoded) == nodes.index(torch.ops._c10d_functional.wait_tensor.default, start) + 1
