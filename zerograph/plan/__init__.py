"""Before a job starts: what it takes on each rank, whether that fits, and how fast it will be.

``closed_form``   model states from a number of parameters, as the ZeRO paper counts them
``machine``       devices and networks as numbers
``costs``         how long one node takes there
``timeline``      when each node of a step runs
"""
