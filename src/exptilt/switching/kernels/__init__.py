"""Compiled arithmetic on flat buffers: one Kalman step, and the recursions forwards and backwards made of it."""
