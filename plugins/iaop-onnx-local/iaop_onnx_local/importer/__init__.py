"""GGUF to ONNX, without PyTorch or transformers. Needs the extra `import` (the onnx package)."""
