"""Training loops as users write them, recorded and run as graphs of whole steps."""
