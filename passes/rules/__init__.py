"""Rules: the SBPs that an operator's inputs and outputs may have together.

``factors``         the notation, and how signatures follow from it
``registry``        the table: ``rule`` adds to it, ``signatures_of`` reads it
``register_rule``   rules that users register
``discover``        signatures of an operator without a rule, found by running it
``pointwise``, ``matmul``, ``reduction``, ``shape``, ``movement``, ``indexing``, ``nn``, ``spatial``, ``loss``
                  the rules, one line per operator
"""

from zerograph.ir.sbp import Signature
from zerograph.passes.rules import (
    experts,
    indexing,
    loss,
    matmul,
    movement,
    nn,
    pointwise,
    reduction,
    shape,
    spatial,
)
from zerograph.passes.rules.registry import (
    all_broadcast,
    arguments,
    output_of,
    output_values,
    rule,
    rule_of,
    signatures_of,
    tensor_arguments,
)

__all__ = [
    "Signature",
    "all_broadcast",
    "arguments",
    "experts",
    "indexing",
    "loss",
    "matmul",
    "movement",
    "nn",
    "output_of",
    "output_values",
    "pointwise",
    "reduction",
    "rule",
    "rule_of",
    "shape",
    "signatures_of",
    "spatial",
    "tensor_arguments",
]
