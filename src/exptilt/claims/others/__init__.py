"""Published results of others that this library can rerun: `exptilt claims --others`."""

from exptilt.claims.others import flows, statistics  # noqa: F401
