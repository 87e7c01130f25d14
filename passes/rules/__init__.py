"""Rules: which SBPs an operator's inputs and outputs may have together.

``factors``    the notation and how signatures follow from it
``discover``   signatures of an operator without a rule, found by trying
``users``      rules that users register
``registry``   the table itself: ``rule`` fills it, ``of_node`` asks it
``pointwise``, ``matmul``, ``linalg``, ``reduction``, ``shape``, ``movement``, ``indexing``, ``nn``, ``spatial``,
``attention``, ``loss``, ``random``   the rules, one line an operator
"""

from zerograph.ir.sbp import Signature
from zerograph.passes.rules import (
    attention,
    indexing,
    linalg,
    loss,
    matmul,
    movement,
    nn,
    pointwise,
    random,
    reduction,
    shape,
    spatial,
)
from zerograph.passes.rules.registry import (
    all_broadcast,
    arguments,
    find,
    of_node,
    output_values,
    rule,
    tensor_arguments,
)

__all__ = [
    "Signature",
    "all_broadcast",
    "arguments",
    "attention",
    "find",
    "indexing",
    "linalg",
    "loss",
    "matmul",
    "movement",
    "nn",
    "of_node",
    "output_values",
    "pointwise",
    "random",
    "reduction",
    "rule",
    "shape",
    "spatial",
    "tensor_arguments",
]
