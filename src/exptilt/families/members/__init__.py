"""The measures: one family a file."""
