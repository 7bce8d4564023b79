"""Configuration of a worker and of a checkpoint folder, read and checked. No PyTorch."""
