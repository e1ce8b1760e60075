"""Build the decode graph from a Hugging Face model, and cut the prefill graph out of it."""
