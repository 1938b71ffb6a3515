"""Learning of parameters by EM and maximum likelihood."""
