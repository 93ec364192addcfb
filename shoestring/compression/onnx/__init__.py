"""Export of compressed models to ONNX, with the same packed weights, for onnxruntime."""
