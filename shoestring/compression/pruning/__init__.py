"""Structured pruning: remove heads, neurons, channels or whole layers, which gives an ordinary smaller model."""
