"""What a run's measurements say: rows, goals, and how they are written. No torch here, and nothing is measured."""
