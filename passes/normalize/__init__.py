"""Passes over the traced graph: bring operators into the forms that later passes know."""
