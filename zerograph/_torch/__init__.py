"""The private torch API that zerograph uses: one wrapper each, with the reason.

Supported: torch 2.11 to 2.15. When torch moves, this is the only package to change.

``tracing``      fake tensors, ``make_fx``, metadata of nodes, Inductor
``attention``    FlexAttention
``autograd``     backward, checkpointing, hooks on gradients
``sizes``        symbolic sizes
``shapes``       shapes of operators with symbolic sizes
``tensors``      tensors, storages, subclasses
``modules``      modules, their hooks, functions of ``torch.nn``
``operators``    schemas and overloads of operators
``optimizers``   optimizers, their hooks, learning rate schedulers
``settings``     settings, modes and kernels that change what a trace yields
``distributed``  process groups and collectives
"""

# Another number after each change of a dict. To compare the 1,500 names of torch takes 20 microseconds.
from torch._C._dynamo.guards import dict_version
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# torch.export's rules for nested values, and the types that users registered with it.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zerograph._torch.attention import *
from zerograph._torch.autograd import *
from zerograph._torch.distributed import *
from zerograph._torch.expressions import *
from zerograph._torch.fake_results import *
from zerograph._torch.modules import *
from zerograph._torch.operators import *
from zerograph._torch.optimizers import *
from zerograph._torch.settings import *
from zerograph._torch.shapes import *
from zerograph._torch.sizes import *
from zerograph._torch.tensors import *
from zerograph._torch.tracing import *


class PlainMode(TorchDispatchMode):
    """A mode whose handler Dynamo may follow: torch's wrapper that keeps it out costs as much as many handlers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
