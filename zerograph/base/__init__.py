"""What every layer may use: nothing here knows graphs."""
