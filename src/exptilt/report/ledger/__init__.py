"""The page of the ledger: every claim with its formula, its evidence, its verdict and lines to run."""

from exptilt.report.ledger.page import write_ledger

__all__ = ["write_ledger"]
