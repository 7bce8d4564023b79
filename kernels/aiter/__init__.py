"""The back end on AMD's AITER, for the operations that AITER has and computes right."""
