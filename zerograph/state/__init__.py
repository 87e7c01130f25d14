"""State between steps: state dicts, checkpoints, replica checks, sharded construction of models."""
