"""Before a job starts: what it takes on each rank, whether that fits, and how fast it will be.

``front``         ``zg.plan``: start here
``subject``       the graph that is planned, and configurations to try on it
``plan``          one rank's step, compiled for any number of ranks, and what can be read from it
``search``        the fastest way that fits
``closed_form``   model states from a number of parameters, as the ZeRO paper counts them
``machine``       devices and networks as numbers; ``machines/`` those that are built in
``calibrate``     measures one
``costs``         how long one node takes there
``timeline``      when each node of a step runs
``show``          plans as tables
``plots``         plans as curves over ranks; ``bars`` memory by kind; ``lanes`` steps over time; ``pictures`` how
                  all of these are made
"""
