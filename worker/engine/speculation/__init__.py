"""Speculative decoding on the engine's side: proposes drafts and chooses how many a step verifies. Pure."""
