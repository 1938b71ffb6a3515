"""The canonical link of the theory, and how far from linear it is."""
