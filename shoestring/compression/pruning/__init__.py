"""Structured pruning: heads, neurons, channels and whole layers are removed, and an ordinary smaller model comes out."""
