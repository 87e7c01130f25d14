"""The driver: from a graph's members and a batch to a compiled step."""
