"""Filters in plain torch: the recursion over any law, diffuse first steps, and all paths of modes."""
