"""Matrix products, convolutions and linear algebra on batches of matrices."""

from __future__ import annotations

import torch

from zerograph.passes.rules.factors import Linear
from zerograph.passes.rules.registry import Operands, added, leading, rule, together

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", linear=(0, 1))
rule(aten.bmm.default, "b m k, b k n -> b m n", linear=(0, 1))
rule(aten.mv.default, "m k, k -> m", linear=(0, 1))


def _addmm(operands: Operands) -> str:
    bias = {0: "", 1: "n", 2: "m n"}[operands.inputs[0].dim()]
    return f"{added(operands, bias)}, m k, k n -> m n"


def _baddbmm(operands: Operands) -> str:
    bias = {0: "", 1: "n", 2: "m n", 3: "b m n"}[operands.inputs[0].dim()]
    return f"{added(operands, bias)}, b m k, b k n -> b m n"


def _addbmm(operands: Operands) -> str:
    bias = {0: "", 1: "n", 2: "m n"}[operands.inputs[0].dim()]
    return f"{added(operands, bias)}, b m k, b k n -> m n"


def _addr(operands: Operands) -> str:
    bias = {0: "", 1: "n", 2: "m n"}[operands.inputs[0].dim()]
    return f"{added(operands, bias)}, m, n -> m n"


def _trilinear(operands: Operands) -> str:
    """Return the notation of a product of three operands, each without its expanded dimensions, summed over some."""
    lines = []
    expanded = (operands["expand1"], operands["expand2"], operands["expand3"])
    rank = operands.inputs[0].dim() + len(expanded[0])
    for missing in expanded:
        lines.append(" ".join(f"d{d}" for d in range(rank) if d not in missing))
    result = " ".join(f"d{d}" for d in range(rank) if d not in operands["sumdim"])
    return ", ".join(lines) + " -> " + result


def _product_added(operands: Operands) -> Linear:
    """Return the linearity of a sum and a product: in the summand together with either factor."""
    return together(0, 1)(operands) + together(0, 2)(operands)


rule(aten.addmm.default, _addmm, linear=_product_added)
rule(aten.baddbmm.default, _baddbmm, linear=_product_added)
rule(aten.addbmm.default, _addbmm, linear=_product_added)
rule(aten.addr.default, _addr, linear=_product_added)
rule(aten._trilinear.default, _trilinear, linear=(0, 1, 2))


def _convolution(operands: Operands) -> str:
    window = "".join(f" w{i}!" for i in range(operands.inputs[0].dim() - 2))
    weight = "".join(f" k{i}!" for i in range(operands.inputs[0].dim() - 2))
    result = "".join(f" o{i}!" for i in range(operands.inputs[0].dim() - 2))
    bias = ", co!" if len(operands.inputs) == 3 else ""
    return f"n ci!{window}, a! b!{weight}{bias} -> n co!{result}"


def _convolution_backward(operands: Operands) -> str:
    window = "".join(f" w{i}!" for i in range(operands.inputs[1].dim() - 2))
    weight = "".join(f" k{i}!" for i in range(operands.inputs[1].dim() - 2))
    result = "".join(f" o{i}!" for i in range(operands.inputs[1].dim() - 2))
    mask = operands["output_mask"]
    outputs = [f"n ci!{window}", f"a! b!{weight}", "co!"]
    return f"n co!{result}, n ci!{window}, a! b!{weight} -> " + ", ".join(
        text for text, is_output in zip(outputs, mask, strict=True) if is_output
    )


rule(aten.convolution.default, _convolution)
rule(aten.convolution_backward.default, _convolution_backward, linear=(0,))

# Decompositions of the last two dimensions, and operators on them.
for _operator in (
    aten._linalg_det.default,
    aten._linalg_eigh.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
    aten._linalg_svd.default,
    aten.cholesky_inverse.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_inv_ex.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_qr.default,
    aten.linalg_solve_triangular.default,
):
    rule(_operator, leading(lambda operands: operands.inputs[0].dim() - 2))

rule(aten._cdist_forward.default, "... p m!, ... r m! -> ... p r")
rule(aten._cdist_backward.default, "... p r, ... p m!, ... r m!, ... p r -> ... p m!", linear=(0,))
