"""Claims about trained models: which models are asked, with which controls, and what they answer."""

from exptilt.claims.models import questions, trained  # noqa: F401
