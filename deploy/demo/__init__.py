"""The embedded demo model: its corpus, its training, its held-out questions and its checkpoint."""
