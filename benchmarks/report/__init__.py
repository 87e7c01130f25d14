"""Report of a run's measurements: rows, goals, and text. Without torch; nothing is measured here."""
