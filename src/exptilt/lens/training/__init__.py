"""Attention during training: readings of every head, logs, warnings, and QK-clip."""
