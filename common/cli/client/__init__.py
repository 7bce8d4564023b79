"""Commands of clients: generate, models, health."""
