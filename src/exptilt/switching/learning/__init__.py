"""Parameters from data: EM and maximum likelihood, over the entries that are free."""
