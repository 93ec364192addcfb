"""Which requests are computed together."""
