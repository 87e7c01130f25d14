"""What pages take as given: a launcher's environment, or the objects that an excerpt of the README speaks of."""

from __future__ import annotations

# As under torchrun, on a port that is free.
_LAUNCHED = """
import os, socket
with socket.socket() as _free:
    _free.bind(("localhost", 0))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free.getsockname()[1])}
"""

PAGES = {"colossalai.md": _LAUNCHED}

# A model with blocks, a graph that trains it, and a batch.
README = """
import torch
import zerograph
import zerograph as zg

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class TrainStep(zg.ZeroGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, x, y):
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss

model = Model()
step = TrainStep(model)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
"""

# What the README's own program has by then.
_TRAINED = """
class TrainStep(zg.ZeroGraph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.loss_fn = torch.nn.CrossEntropyLoss()
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
step.compile(x, y)
"""

# By section, what comes behind that.
README_SECTIONS = {
    "Operators of your own": """
@torch.library.custom_op("mine::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
""",
    "Regions that ranks compute on their own": """
from types import SimpleNamespace
mixtral = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(mlp=torch.nn.Linear(8, 8))]))
moe = torch.nn.Linear(8, 8)
""",
    # A placement of four ranks is one of a job of four.
    "Two mesh dimensions": """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
""",
    "Looking at the graph": _TRAINED,
    "Before there is a job": _TRAINED,
}
