"""How far a bundle's pruned prefill is from the full model; without torch unless the full side is a checkpoint."""
