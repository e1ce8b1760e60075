"""Run a bundle made by `pop-export`: numpy, onnxruntime, tokenizers and jinja2 only."""
