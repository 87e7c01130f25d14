"""The graph dialect: the words that passes and runtime share, and nothing of either."""
