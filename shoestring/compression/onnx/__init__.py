"""Compressed models as ONNX: the same packed weights, for onnxruntime."""
