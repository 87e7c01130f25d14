"""Offloaded tensors: the kernels of the operators of ``zerograph.ops.offload``.

Tensors are in files (``files``), between which and memory threads move them (``transfers``) through whole pages
(``buffers``), or in the memory of another device (``devices``).
"""

from zerograph.runtime.offload import devices, transfers

__all__ = ["devices", "transfers"]
