"""Offloaded tensors: the kernels of the operators of ``zerograph.ir.offload_operators``.

In files (``files``), moved there and back by threads (``transfers``) through whole pages (``buffers``), or in the
memory of another device (``devices``).
"""

from zerograph.runtime.offload import devices, transfers

__all__ = ["devices", "transfers"]
