"""Server optimizers: how the server's weights follow from the combined update."""
