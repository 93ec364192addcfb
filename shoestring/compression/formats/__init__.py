"""How a weight is stored: packed tensors, and how the dense weight is computed from them."""
