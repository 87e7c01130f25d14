"""Meshes of ranks, for ``prepare()`` and ``config.mesh.placement``. Implemented in :mod:`zerograph.ir.mesh`."""

from zerograph.ir.mesh import Mesh, line

__all__ = ["Mesh", "line"]
