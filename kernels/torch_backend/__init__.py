"""The reference back end: plain PyTorch, batch-invariant on a CPU."""
