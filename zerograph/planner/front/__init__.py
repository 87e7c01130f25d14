"""``zg.plan`` and ``zerograph calibrate``: the part of the planner that makes graphs of its own."""
