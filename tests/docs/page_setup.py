"""The environment that pages assume: a launcher's."""

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
