"""The landscape of a memory, measured: margins between patterns, basins of attraction, recall, fixed points."""
