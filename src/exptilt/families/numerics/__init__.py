"""Functions of numbers and arrays that the families share."""
