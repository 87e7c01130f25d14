"""OneFlow's names over zerograph: ``import zerograph.compat.oneflow as flow``.

Scripts that train with OneFlow's ``nn.Graph`` and ZeRO run with their imports changed; docs/oneflow.md lists what maps
to what. Other names are torch's: ``flow.int64``, ``flow.no_grad``. The import adds OneFlow's methods to torch's tensors
and modules: :mod:`zerograph.compat.oneflow.installed` lists them.
"""

from __future__ import annotations

import sys

import torch
import torch.utils.data

from zerograph.compat.oneflow import amp, boxing, env, installed, nn, one_embedding, optim, sbp, utils
from zerograph.compat.oneflow.factories import FACTORIES
from zerograph.compat.oneflow.files import load, save
from zerograph.compat.oneflow.names import names_of
from zerograph.compat.oneflow.placements import placement

__all__ = ["amp", "boxing", "env", "load", "nn", "one_embedding", "optim", "placement", "save", "sbp", "utils"]

installed.install()
globals().update(FACTORIES)

# For import statements: import zerograph.compat.oneflow.utils.data as data.
for _name in ("autograd", "utils.data", "nn.init", "nn.parallel", "nn.parameter", "nn.utils", "nn.utils.rnn"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[f"torch.{_name}"]


__getattr__ = names_of(torch)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(torch)})
