"""Faults of a run of weeks: ranks that die or stall, saves that are cut short, files that are damaged."""
