"""The questions that the theory asks about a trained transformer, one per file."""
