"""Compression of client updates and of the weights sent to devices: codecs that can be chained and that state their
error."""
