"""What computes answers: torch, packed weights, onnxruntime."""
