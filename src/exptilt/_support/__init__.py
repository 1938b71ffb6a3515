"""What every floor of the house stands on: errors, checks, progress."""
