"""``flow.boxing``: the switches of OneFlow's communication."""

from zerograph.compat.oneflow.boxing import nccl

__all__ = ["nccl"]
