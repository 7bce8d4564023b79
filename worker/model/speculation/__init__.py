"""Draft models, the drafts they propose, and the verification of drafts. PyTorch."""
