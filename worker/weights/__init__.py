"""Weights: checkpoints read and checked, tensors as they are stored, packed weights kept in files."""
