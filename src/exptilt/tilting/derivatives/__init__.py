"""Derivatives of attention: the identities, the rules that torch calls, and the operators that compiled graphs hold."""
