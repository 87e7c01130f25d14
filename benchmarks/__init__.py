"""Against peers, one command each."""
