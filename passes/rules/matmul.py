"""Matrix products, convolutions and linear algebra on batches of matrices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import torch

from zerograph.ir.sizes import hints
from zerograph.passes.rules.registry import Operands, added, joined, leading, product_added, rule

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", linear=(0, 1))
rule(aten.bmm.default, "b m k, b k n -> b m n", linear=(0, 1))
rule(aten.mv.default, "m k, k -> m", linear=(0, 1))


def _and_summand(product: str) -> Callable[[Operands], str]:
    """Return the notation of a product to which the first operand is added, aligned at the right."""
    names = product.rpartition("-> ")[2].split()

    def notation(operands: Operands) -> str:
        return f"{added(operands, ' '.join(names[len(names) - operands.inputs[0].dim() :]))}, {product}"

    return notation


def _trilinear(operands: Operands) -> str:
    """Return the notation of a product of three operands, each without its expanded dimensions, summed over some."""
    missing = [operands[name] for name in ("expand1", "expand2", "expand3", "sumdim")]
    rank = operands.inputs[0].dim() + len(missing[0])
    return joined(operands, [" ".join(f"d{d}" for d in range(rank) if d not in dims) for dims in missing])


rule(aten.addmm.default, _and_summand("m k, k n -> m n"), linear=product_added)
rule(aten.baddbmm.default, _and_summand("b m k, b k n -> b m n"), linear=product_added)
rule(aten.addbmm.default, _and_summand("b m k, b k n -> m n"), linear=product_added)
rule(aten.addr.default, _and_summand("m, n -> m n"), linear=product_added)
rule(aten._trilinear.default, _trilinear, linear=(0, 1, 2))


def _convolution(operands: Operands) -> str:
    images, weight, result = _convolved(operands)
    bias = ", co!" if len(operands.inputs) == 3 else ""
    return f"{images}, {weight}{bias} -> {result}"


def _convolution_backward(operands: Operands) -> str:
    images, weight, result = _convolved(operands)
    return f"{result}, {images}, {weight} -> " + ", ".join(compress([images, weight, "co!"], operands["output_mask"]))


def _convolved(operands: Operands) -> list[str]:
    """Return the factors of images, weight and result; a window has as many dimensions in each."""
    window, pairs = range(operands.inputs[0].dim() - 2), (("n ci!", "w"), ("a! b!", "k"), ("n co!", "o"))
    return [" ".join([first, *(f"{name}{i}!" for i in window)]) for first, name in pairs]


rule(aten.convolution.default, _convolution)
rule(aten.convolution_backward.default, _convolution_backward, linear=(0,))

# Decompositions of the last two dimensions, and operators on them.
for _operator in (
    aten._linalg_det.default,
    aten._linalg_eigh.default,
    aten._linalg_slogdet.default,
    aten._linalg_svd.default,
    aten.cholesky_inverse.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_inv_ex.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_qr.default,
):
    rule(_operator, leading(lambda operands: operands.inputs[0].dim() - 2))


def _solved(*dims: int) -> Callable[[Operands], str]:
    """Return the notation of a solution; batches of matrices and of right sides are broadcast.

    Args:
        dims: for the inputs, then the outputs, the number of dimensions besides the batch, if right sides are matrices.
    """

    def notation(operands: Operands) -> str:
        matrix, right, solution = operands.inputs[0], operands.inputs[-1], operands.outputs[0]
        are_vectors = solution.dim() < matrix.dim()
        # Other results follow from the matrices, which are whole where their batch is not that of the solution.
        of_matrices = are_vectors or hints(matrix.shape[:-2]) == hints(solution.shape[:-2])
        batch = "..." if of_matrices or len(operands.outputs) == 1 else "...!"
        texts = []
        for number, (value, own) in enumerate(zip((*operands.inputs, *operands.outputs), dims, strict=True)):
            count = own - (are_vectors and (value is right or value is solution))
            texts.append(" ".join([batch, *(f"v{number}x{i}!" for i in range(count))]))
        return joined(operands, texts)

    return notation


rule(aten._linalg_solve_ex.default, _solved(2, 2, 2, 2, 1, 0))
rule(aten.linalg_lu_solve.default, _solved(2, 1, 2, 2))
rule(aten.linalg_solve_triangular.default, _solved(2, 2, 2))

rule(aten._cdist_forward.default, "... p m!, ... r m! -> ... p r")
rule(aten._cdist_backward.default, "... p r, ... p m!, ... r m!, ... p r -> ... p m!", linear=(0,))
