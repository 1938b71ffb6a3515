"""Compiled arithmetic on flat buffers: one Kalman step, and the recursions made of it."""
