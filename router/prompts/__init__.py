"""Texts and conversations to token ids."""
