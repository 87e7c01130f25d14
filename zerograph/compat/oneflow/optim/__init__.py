"""``flow.optim``: OneFlow's optimizers where they differ from torch's, and torch's others."""

from __future__ import annotations

import torch

from zerograph.compat.oneflow.names import names_of
from zerograph.compat.oneflow.optim import lr_scheduler
from zerograph.compat.oneflow.optim.base import Optimizer
from zerograph.compat.oneflow.optim.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop", "lr_scheduler"]

__getattr__ = names_of(torch.optim)
