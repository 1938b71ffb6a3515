"""Statistics of one head in one call, the attention its keys draw, and its scores."""
