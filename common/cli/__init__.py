"""The `fissile` command line."""
