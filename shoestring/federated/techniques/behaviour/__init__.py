"""Behaviour of simulated devices: they drop out, are slow, or are malicious. Real devices do that by themselves."""
