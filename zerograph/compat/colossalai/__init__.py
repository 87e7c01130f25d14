"""ColossalAI's front door."""
