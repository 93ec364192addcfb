"""Differential privacy: clipping bounds the influence (sensitivity) of one device, and noise hides it."""
