"""Rules that make one update of all that arrived."""
