"""Export a decoder language model as a pruned prefill graph and a full decode graph over one set of weights."""
