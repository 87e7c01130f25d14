"""``zg.plan`` and ``zerograph calibrate``: the part of the planner that creates graphs."""
