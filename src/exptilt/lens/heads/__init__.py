"""What one head does in one call: its statistics, the attention its keys draw, its scores."""
