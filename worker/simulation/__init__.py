"""An engine without a model: a simulated runner and its cost models."""
