"""One graph pass per file; each takes an ONNX graph, changes it in place and says how often it did."""
