"""Public example scripts in short, and steps through the front doors of frameworks."""
