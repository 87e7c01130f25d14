"""Checkpoint files: each rank's parts of the named tensors, in safetensors files, and an index that makes them valid.

``boxes``        the boxes of a tensor that a range of a flat bucket covers
``pieces``       the boxes of named tensors that a rank holds
``index``        the JSON file that makes a checkpoint valid
``storage``      write and read the safetensors files
``lock``         one save at a time per folder
``file_tensor``  tensors that are read from safetensors files in rows, when they are needed
"""
