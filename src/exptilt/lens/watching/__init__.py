"""Taking over the attention of a model while it runs, and recording what it does."""
