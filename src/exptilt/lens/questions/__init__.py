"""What the theory asks of a trained transformer, one question a file."""
