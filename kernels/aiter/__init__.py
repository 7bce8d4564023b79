"""The back end on AMD's AITER, for what it has and does right."""
