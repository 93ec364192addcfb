"""Smaller and faster: a model within a size, a latency and a quality floor at once."""
