"""Privacy: what a release tells of one record or one device, bounded and counted."""
