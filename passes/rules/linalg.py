"""Linear algebra of many matrices at once: each matrix for itself, and whole."""

from __future__ import annotations

import torch

from zerograph.passes.rules.registry import leading, rule

aten = torch.ops.aten

# Decompositions and what is computed from them, of the last two dimensions.
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
