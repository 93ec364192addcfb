"""Sparse training: weights that become zero while they are trained, by four methods, as ordinary jobs."""
