"""The router's own metrics."""
