"""Checkpoints: what each rank holds of the named tensors, in safetensors files and one index that makes them valid.

``boxes`` says which boxes of a tensor a stretch of a flat bucket is, ``pieces`` tells ``torch.distributed.checkpoint``
of them, ``index`` is the file that a checkpoint is, ``storage`` writes and reads the rest, ``folder`` puts a new
checkpoint in the place of an old one.
"""
