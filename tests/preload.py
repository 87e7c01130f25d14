"""Import everything and trace one step without a job, so that processes forked from here need not.

The first trace of a process takes three times as long as the next.
"""

import torch

from tests.models import TrainStep, adamw, batches, make
from zerograph.ir.mesh import line

torch.set_num_threads(1)

# Where torch is built for CUDA the first backward() starts threads, with a GPU or without.
if not torch.backends.cuda.is_built():
    _model = make("gpt")
    _step = TrainStep(_model, adamw(_model), 2)
    _step.prepare(line(2, 0, "ranks"), *(tensor[:4] for tensor in batches("gpt", 1)[0]))
