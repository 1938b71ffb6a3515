"""Functions of numbers and arrays that the families share: no measures in here."""
