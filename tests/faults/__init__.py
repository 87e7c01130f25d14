"""What a run of weeks meets: ranks that die or stall, saves that are cut short, files that are damaged."""
