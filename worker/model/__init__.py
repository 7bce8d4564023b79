"""The model on PyTorch: runner, layers and architectures."""
