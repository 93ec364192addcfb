"""Serve: a target in, the best server out."""
