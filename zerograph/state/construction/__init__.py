"""Construct models that are sharded from the start: record the construction, then run it tensor by tensor.

``recorder`` records the operators of the construction as a ``program``, and ``generators`` tracks the states of random
generators meanwhile. ``schedule`` selects and orders the entries to run and finds how long each value lives, ``replay``
runs them, and ``fingerprint`` describes a program so that ranks can compare theirs.
"""
