"""Derivatives of attention: the identities, the rules that torch calls, the operators of compiled graphs."""
