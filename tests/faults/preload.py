"""What a rank of these tests has done before it begins: imported everything, and traced one step without a job.

Ranks that will be lost are forked from a server that imports this once, so that each costs no start of its own.
"""

import torch

from tests.models import TrainStep, adamw, batches, make
from zerograph.ir.mesh import line

torch.set_num_threads(1)

_model = make("mlp")
_step = TrainStep(_model, adamw(_model), 2)
_step.prepare(line(2, 0, "ranks"), *(tensor[:4] for tensor in batches("mlp", 1)[0]))
