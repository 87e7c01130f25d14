"""What rests elsewhere than on the device that computes with it: what the nodes of ``zerograph.ir.transfers`` do.

In files (``files``), moved there and back by threads (``transfers``) through whole pages (``buffers``), or in the
memory of another device (``devices``).
"""

from zerograph.runtime.offload import devices, transfers

__all__ = ["devices", "transfers"]
