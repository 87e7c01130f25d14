"""Numbers on a device against plain PyTorch there: ``make test-gpu``. ``make test`` runs a slice of it on the CPU."""

from pathlib import Path

FOLDER = Path(__file__).parent
