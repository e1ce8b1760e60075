"""Settings of every exporter test."""

import torch

# tiny models are slower with more threads, ten times so on a busy machine
torch.set_num_threads(1)
