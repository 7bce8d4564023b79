"""What a worker is told and what a checkpoint folder says, read and checked. No PyTorch."""
