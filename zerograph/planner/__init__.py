"""Predict a job before it starts: memory on each rank, whether it fits, and speed.

``front``         ``zg.plan``: start here
``plan``          one rank's step, compiled for any number of ranks
``plan_data``     the numbers of a plan, and tables of them
``search``        the fastest way that fits
``stored``        bytes of a layout, before any pass runs
``closed_form``   model states from a number of parameters, as the ZeRO paper counts them
``machine``       devices and networks as numbers; ``machines/`` has the built-in ones
``costs``         seconds of one node on a machine
``timeline``      start and end of each node of a step
``speed``         tokens, operations and peak rates
``pictures``      plans as pictures
"""
