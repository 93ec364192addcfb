"""Federated learning: updates leave a device, records never do."""
