"""Techniques of serving, one a file."""
